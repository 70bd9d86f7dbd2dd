"""Runs exported StableHLO folders on XLA's CPU devices and compares them with what they should give.

    check.py CASES.json

CASES.json is a list of {"model", "recipe", "devices", "folder", "reference", "draft"}: the folder of
`radpack export --format stablehlo`, and the safetensors files of what transformers gives for the model and for its draft
head, if it has one.

A case is a prompt of 40 tokens and, for models with images, a second one with two images in it: prefill calls of up to 16
tokens or one image, then the prompts' last tokens and eight greedy ones in decode steps of both prompts together.
Compared are the logits behind every call, the greedy tokens, and the images' rows:

* of an unquantized artifact with transformers' run in f32;
* of a quantized one for several devices with the same artifact for one device.

One artifact, `aligned`, is for a target on which sequences leave slots unused: here a few before every call. Its cache is f16.

A draft head takes four steps behind a prompt of its own; logits, projected states and tokens are those of transformers.

Afterwards three mistakes are seeded, one at a time, into what devices hold: the shards of two devices are swapped, one
scale is halved, the keys and values of one device are another head's. A check that does not report each is broken.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

DEVICES = 16
# Modules run a few times each: compiling takes longer than running, and LLVM's optimizations half of that.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_X64"] = "1"  # Else 64-bit integers become 32-bit ones.

import numpy as np

from host import Host
from modules import Folder, read_tensors

# Last tokens of a prompt that are decoded one at a time, so that logits of decode steps are compared with transformers'.
BY_STEPS = 6
# Greedy steps behind the prompt.
GREEDY = 8
# Absolute, of logits with a standard deviation of about 4.
AGAINST_TRANSFORMERS = 2e-3
AGAINST_ONE_DEVICE = 5e-3
# With a cache in f16, whose values have 11 bits.
AGAINST_TRANSFORMERS_F16 = 3e-2


class Run:
    """What a host got: logits by what they follow, tokens, and rows of images."""

    def __init__(self, logits, tokens, features):
        self.logits, self.tokens, self.features = logits, tokens, features


def run(folder, reference, own=None, said=None):
    """Serves the reference's prompts together. `said` is what to decode after them, else what the model says."""
    host = Host(folder, own)
    prompts = [("text", reference["text.input_ids"], [])]
    if "image.input_ids" in reference and folder.document.get("host"):
        images = zip(reference["image.pixel_values"], reference["image.image_position_ids"])
        prompts.append(("image", reference["image.input_ids"], list(images)))
    logits, tokens, features, sequences = {}, {}, None, []
    for slot, (name, ids, images) in enumerate(prompts):
        sequence = host.start(slot)
        for at, row in host.prefill(sequence, ids[:-BY_STEPS], images):
            logits[f"{name} token {at}"] = row
        features = np.concatenate(host.features) if images else features
        tokens[name] = []
        sequences.append((name, ids, sequence))
    for step in range(-BY_STEPS, GREEDY):
        feed = said or tokens
        fed = [(s, int(ids[step]) if step < 0 else feed[name][step]) for name, ids, s in sequences]
        for (name, ids, _), row in zip(sequences, host.decode(fed)):
            logits[f"{name} token {len(ids) + step}"] = row
            if step >= -1:
                tokens[name].append(int(row.argmax()))
    return Run(logits, tokens, features)


def drafts(folder, reference, own):
    """Faults of a draft head's steps, and the largest difference."""
    host = Host(folder, own)
    sequence = host.start(1)
    for _, logits in host.prefill(sequence, reference["draft.input_ids"]):
        first = int(logits.argmax())
    if first != int(reference["draft.first_token"][0]):
        return np.inf, [f"the token that drafts begin behind is {first}"]
    worst, faults = 0.0, []
    steps = host.draft(sequence, first, len(reference["draft.tokens"]))
    for n, (logits, projected, token) in enumerate(steps):
        for what, row in (("logits", logits), ("projected", projected)):
            apart = float(np.abs(row - reference[f"draft.{n}.{what}"]).max())
            worst = max(worst, apart if np.isfinite(apart) else np.inf)
        if token != int(reference["draft.tokens"][n]):
            faults.append(f"step {n} of the draft head says {token}")
    if not worst <= AGAINST_TRANSFORMERS:
        faults.append(f"values of the draft head differ by {worst:.2g}")
    return worst, faults


def expected(reference, got):
    """What transformers says, for the same calls; of what follows a prompt, the tokens."""
    logits = {}
    for label in got.logits:
        name, _, at = label.split()
        if int(at) < len(reference[f"{name}.logits"]):
            logits[label] = reference[f"{name}.logits"][int(at)]
    tokens = {name: [int(t) for t in reference[f"{name}.greedy_ids"][: GREEDY + 1]] for name in got.tokens}
    return Run(logits, tokens, reference.get("image.image_features") if got.features is not None else None)


def compare(got, want, within):
    """The largest difference of logits, and faults."""
    faults, worst = [], (0.0, "")
    for label, row in want.logits.items():
        apart = np.abs(got.logits[label] - row).max()
        # NaN compares as nothing.
        worst = max(worst, (float(apart if np.isfinite(apart) else np.inf), label))
    if not worst[0] <= within:
        faults.append(f"logits differ by {worst[0]:.2g} behind {worst[1]}")
    for name, tokens in want.tokens.items():
        if got.tokens[name] != tokens:
            faults.append(f"{name} tokens are {got.tokens[name]}, not {tokens}")
    if want.features is not None:
        apart = float(np.abs(got.features - want.features).max()) if got.features.shape == want.features.shape else np.inf
        if not apart <= within:
            faults.append(f"rows of images differ by {apart:.2g}")
    return worst[0], faults


# ---- mistakes


def swap_shards(folder):
    own = [dict(d) for d in folder.own]
    name = next(n for n in own[1] if n.startswith("blk.0.ffn_down."))
    own[1][name], own[2][name] = own[2][name], own[1][name]
    return own, f"{name} of devices 1 and 2 swapped"


def halve_scale(folder):
    own = [dict(d) for d in folder.own]
    for name in sorted(own[1]):
        if name.startswith("blk.0.") and name.endswith(":scale"):
            changed = own[1][name].copy()
            flat = changed.reshape(-1)
            flat[0] = (flat[0].astype(np.float32) / 2).astype(flat.dtype)
            own[1][name] = changed
            return own, f"the first scale of {name} of device 1 halved"
    return None


def misplace_head(folder):
    own = [dict(d) for d in folder.own]
    for other in range(2, len(own)):
        names = [n for n in own[1] if n.startswith(("blk.0.attn_k.", "blk.0.attn_v."))]
        if names and any((own[1][n] != own[other][n]).any() for n in names):
            for name in names:
                own[1][name] = own[other][name]
            return own, f"keys and values of layer 0 on device 1 are those of device {other}"
    return None


MISTAKES = {"swap": swap_shards, "scale": halve_scale, "head": misplace_head}


# ---- cases


def check(cases, sabotage):
    """Cases of one artifact over numbers of devices, the first the one that quantized ones are compared with: rows of the
    table, lines about seeded mistakes, the mistakes that were tried, and faults."""
    rows, lines, tried, faults, first = [], [], set(), [], None
    for case in cases:
        title = f"{case['model']} {case['recipe']} on {case['devices']}"
        reference = read_tensors(Path(case["reference"]))
        start = time.monotonic()
        folder = Folder(Path(case["folder"]))
        compiled = time.monotonic()
        own = None
        if sabotage and case["devices"] > 1 and (made := MISTAKES[sabotage](folder)):
            own, what = made
            tried.add(sabotage)
            lines.append(f"{title}: {what}")
        got = run(folder, reference, own, first and first.tokens)
        ran = time.monotonic()
        if case["recipe"] in ("keep", "aligned"):
            want = expected(reference, got)
            within = AGAINST_TRANSFORMERS if case["recipe"] == "keep" else AGAINST_TRANSFORMERS_F16
        else:
            want, within = first or got, AGAINST_ONE_DEVICE
            first = want
        off, found = compare(got, want, within)
        if case.get("draft"):
            of_draft, more = drafts(folder, read_tensors(Path(case["draft"])), own)
            off, found = max(off, of_draft), found + more
        found += [f"{p['name']} is left out: {p['reason']}" for p in folder.document["left_out"]]
        faults += [f"{title}: {fault}" for fault in found]
        verdict = "first" if want is got else "same" if not found else f"{len(found)} faults"
        rows.append(
            (case["model"], case["recipe"], case["devices"], len(folder.modules), f"{compiled - start:.1f}")
            + (f"{ran - compiled:.1f}", len(want.logits), f"{off:.1e}", verdict)
        )
        if case["devices"] == 1 or found or sabotage:
            continue
        for mistake in sorted(MISTAKES.keys() - tried):
            if (made := MISTAKES[mistake](folder)) is None:
                continue
            own, what = made
            tried.add(mistake)
            _, seen = compare(run(folder, reference, own, want.tokens), want, within)
            lines.append(f"{title}: {what}: {seen[0] if seen else 'NOT FOUND'}")
            if not seen:
                faults.append(f"{title}: the check does not see that {what}")
    return rows, lines, tried, faults


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("--sabotage", choices=MISTAKES, help="seed this mistake into every case that can have it")
    args = parser.parse_args()
    groups = {}
    for case in json.loads(args.cases.read_text()):
        groups.setdefault((case["model"], case["recipe"]), []).append(case)
    layout = "{:18} {:9} {:>7} {:>7} {:>9} {:>7} {:>7} {:>9}  {}"
    header = ("model", "recipe", "devices", "modules", "compile s", "run s", "logits", "off", "verdict")
    print(layout.format(*header), flush=True)
    lines, tried, faults = [], set(), []
    # XLA compiles one module on one core. Processes are spawned: a copy of one that has started XLA hangs.
    workers = min(os.cpu_count() or 1, 4, len(groups))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for found in [pool.submit(check, group, args.sabotage) for group in groups.values()]:
            rows, of_lines, of_tried, of_faults = found.result()
            for row in rows:
                print(layout.format(*row), flush=True)
            lines, tried, faults = lines + of_lines, tried | of_tried, faults + of_faults
    wanted = {args.sabotage} if args.sabotage else set(MISTAKES)
    if len({model for model, _ in groups}) == 1:
        # One model alone may have a single key head, which no device can hold wrongly.
        wanted &= {args.sabotage}
    faults += [f"no case could have the mistake {mistake}" for mistake in sorted(wanted - tried)]
    if lines:
        print("\nseeded mistakes:")
        for line in lines:
            print(f"  {line}")
    for fault in faults:
        print(f"fault: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
