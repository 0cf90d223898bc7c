"""Few bits a number: packing, codes with scales, and the averaging of what is sent so."""
