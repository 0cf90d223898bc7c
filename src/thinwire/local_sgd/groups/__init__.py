"""The members that average: a group that stays, subgroups, shards, and members that come and go."""
