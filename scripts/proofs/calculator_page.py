"""The site's calculator, as Chromium shows it, says what `thinwire advise` says. Run `make docs` before."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
# The fields' first values, on a link without latency.
FIRST_VALUES = "--parameters 350M --compute 0.8s --rate 1gbit --latency 0ms --optimizer AdamW --steps 20000"


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site without a log."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def shown_page() -> str:
    """Return the calculator's page after its scripts have run."""
    with (
        tempfile.TemporaryDirectory() as profile,
        ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE))) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/docs/calculator/"
        run = [*CHROMIUM, "--dump-dom", f"--user-data-dir={profile}", address]
        page = subprocess.run(run, capture_output=True, text=True, timeout=120, check=True).stdout
        server.shutdown()
    return page


def main() -> None:
    """Compare every row of the page's table with the command's answer."""
    if shutil.which("chromium") is None:
        print("skipped: Chromium is not installed")
        return
    page = shown_page()
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", page)]
    shown = {cells[0].partition(", DDP")[0].replace("&quot;", '"'): cells[1:] for cells in rows if cells}
    run = [sys.executable, "-m", "thinwire", "advise", "--json", *FIRST_VALUES.split()]
    advice = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    expected = {"computing alone": ["800.0", "", ""]}
    for way in advice["predictions"]:
        if not way["name"].startswith("TopK"):
            percent = way["loss"]["percent"]
            loss = "?" if percent is None else f"{percent:.1f}".replace("-0.0", "0.0")
            megabytes = way["sent_bytes"] / 1e6
            expected[way["name"]] = [
                f"{1e3 * way['step_seconds']:.1f}",
                f"{megabytes:#.4g}".rstrip("."),
                loss,
            ]
    assert shown.items() >= expected.items(), (shown, expected)
    assert f"Do this: {advice['best']['code']}<" in page
    print(f"ok: {len(expected)} rows, and the line to add: {advice['best']['code']}")


if __name__ == "__main__":
    main()
