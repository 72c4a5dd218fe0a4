"""Makes the closed forms of presets that come with autopar, so that a first ``autopar plan`` needs no trace.

    python benchmarks/forms.py [PRESET ...]

One trace of each preset, with the layouts that each profile's prices choose; equal ones are written once. They are used
as long as the sources that were loaded here, torch and transformers are the same: run it again when those change.
Presets that are not named are removed. ``tests/cli/test_kept.py`` compares some with what a trace gives now.
"""

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from autopar import shelf
from autopar.cost.hardware import load, names
from autopar.learned import Named
from autopar.presets import configuration
from autopar.presets import names as presets

MACHINES = tuple(n for n in names() if n != "cpu")  # whose profile stands for nothing before it is calibrated


def text_of(preset: str) -> tuple[str, int]:
    """One preset's file, and how many different families it has."""
    machines = [load(n) for n in MACHINES]
    known: dict[str, int] = {}
    at = {}
    for machine, found in zip(machines, Named(f"hf:{preset}").learn_on(machines)):
        at[shelf.name_of(repr(replace(machine, ranks=0)))] = known.setdefault(found.text(), len(known))
    entry = {"preset": preset, "machines": at, "known": [json.loads(text) for text in known]}
    return json.dumps(entry, separators=(",", ":")), len(known)


def loaded() -> list[str]:
    """Files of the package that this process has loaded, by their place in it."""
    files = (getattr(m, "__file__", None) for name, m in sorted(sys.modules.items()) if name.split(".")[0] == "autopar")
    return sorted({str(Path(f).relative_to(shelf.ROOT)) for f in files if f})


def main() -> None:
    """Make the files anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=presets(), help="default: all")
    torch.set_num_threads(1)
    written = {}
    for preset in parser.parse_args().presets:
        start = time.process_time()
        text, count = text_of(preset)
        written[f"{shelf.name_of(configuration(preset))}.json"] = text
        print(f"{preset}: {count} of {len(MACHINES)} profiles differ, {len(text) / 2**10:.0f} KiB, "
              f"{time.process_time() - start:.1f} CPU seconds", flush=True)  # fmt: skip
        gc.collect()
    made = {"packages": shelf.packages(), "files": loaded()}
    made["sources"] = shelf.sources_of(made["files"])
    shelf.SHIPPED.mkdir(exist_ok=True)
    for path in shelf.SHIPPED.glob("*.json"):
        path.unlink()
    for name, text in {**written, "made.json": json.dumps(made, indent=1)}.items():
        (shelf.SHIPPED / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
