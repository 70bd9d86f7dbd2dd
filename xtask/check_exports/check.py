"""Loads exported folders with transformers and compares them with radpack's own decoded weights.

    check.py FOLDER CASE...    (CASE: MODEL/RECIPE)

FOLDER/CASE holds three exports of one artifact:

    compressed   --format compressed-tensors
    f32          --format safetensors --dtype f32: the values that radpack decodes
    bf16         --format safetensors: the same, rounded

Compared, for each case:

* In f32: compressed-tensors decompresses the whole model (what its hook does before the first forward pass); every weight
  must be the one of the f32 folder, bit for bit, and the logits of fixed tokens must be the same. Logits are compared
  with the quantization of activations switched off: it happens while the model runs, on values that no folder holds,
  and would change the logits of a folder whose weights are all right.
* As published (bf16, activations quantized where the configuration says so): the model must run and give finite
  logits, and its weights must be those of the bf16 folder.
* transformers must report no missing, unexpected or mismatched tensor.

NVFP4 is the one format whose arithmetic permits less. The library divides the block scale by the global scale g; the
artifact stores 1 / g and multiplies: up to 2 units in the last place of an f32 apart. It also decompresses to bf16
whatever the model's type is; for the comparison in f32 its unpacking is asked for f32. After rounding to bf16 a few
values are the neighbouring ones.

In the end one bit of one scale is flipped in copies of the folders: a check that does not report it is broken.
"""

import argparse
import functools
import json
import os
import shutil
import struct
import sys
from pathlib import Path

# Nothing here needs the network, a GPU, or progress bars.
os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch
import transformers
from compressed_tensors.compressors.nvfp4 import base as nvfp4
from loguru import logger

# compressed-tensors warns of blocks that overhang a weight, once for each.
logger.remove()

TOKENS = torch.tensor([[2] + [(37 * i + 11) % 480 + 8 for i in range(23)]])
LOGITS_WITHIN = 1e-5  # of the largest logit
NVFP4_UNITS = {torch.float32: 2, torch.bfloat16: 1}
unpack_fp4 = nvfp4.unpack_fp4_from_uint8


def load(folder, dtype, faults):
    """The model of a folder by the class that its configuration names."""
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model, report = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    faults += [f"{what.replace('_', ' ')}: {sorted(map(str, names))[:3]}" for what, names in report.items() if names]
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits


def units_apart(a, b):
    """The largest distance of two tensors in units in the last place."""
    integer = {4: torch.int32, 2: torch.int16}[a.element_size()]
    a, b = (t.contiguous().view(integer).long() for t in (a, b))
    # Sign and magnitude become one order, in which neighbours differ by 1.
    lowest = torch.iinfo(integer).min
    a, b = (torch.where(t < 0, lowest - t, t) for t in (a, b))
    return (a - b).abs().max().item()


def compare_weights(got, want, permitted, faults):
    """How many weights are compared and how many are equal; adds a fault for each that is further apart than permitted."""
    got, want = got.state_dict(), want.state_dict()
    equal = 0
    for name, wanted in want.items():
        weight = got.get(name)
        if weight is None or weight.shape != wanted.shape or weight.dtype != wanted.dtype:
            faults.append(f"{name} is not a {wanted.dtype} of shape {tuple(wanted.shape)}")
        elif torch.equal(weight, wanted):
            equal += 1
        elif (units := units_apart(weight, wanted)) > permitted:
            faults.append(f"{name} is {units} units of {wanted.dtype} off")
    return len(want), equal


def check(folder):
    """One case: the cells of its row and its faults."""
    faults = []
    config = json.loads((folder / "compressed/config.json").read_text())
    is_nvfp4 = config["quantization_config"]["format"] == "nvfp4-pack-quantized"
    permitted = NVFP4_UNITS if is_nvfp4 else dict.fromkeys(NVFP4_UNITS, 0)

    nvfp4.unpack_fp4_from_uint8 = functools.partial(unpack_fp4, dtype=torch.float32)
    ours = load(folder / "f32", torch.float32, faults)
    theirs = load(folder / "compressed", torch.float32, faults)
    theirs.hf_quantizer.compressor.decompress_model(theirs)
    weights, equal = compare_weights(theirs, ours, permitted[torch.float32], faults)
    quantized = [m for m in theirs.modules() if hasattr(m, "quantization_scheme")]
    if not quantized:
        faults.append("no module is quantized")
    for module in quantized:
        module.quantization_enabled = False
    want, got = logits(ours), logits(theirs)
    apart = (got - want).abs().max().item()
    if not apart <= LOGITS_WITHIN * want.abs().max().item():
        faults.append(f"logits differ by {apart:.3g}, the largest is {want.abs().max().item():.3g}")

    nvfp4.unpack_fp4_from_uint8 = unpack_fp4
    published = load(folder / "compressed", "auto", faults)
    if not logits(published).isfinite().all():
        faults.append("logits of the model as published are not finite")
    rounded = load(folder / "bf16", "auto", faults)
    _, equal_rounded = compare_weights(published, rounded, permitted[torch.bfloat16], faults)
    cells = [len(quantized), weights, equal, equal_rounded, f"{apart:.2g}", f"{want.abs().max().item():.3g}"]
    return cells, faults


def flip_scale(folder):
    """Flips the lowest bit of the first weight scale of a compressed folder and returns the tensor's name."""
    for path in sorted((folder / "compressed").glob("*.safetensors")):
        data = bytearray(path.read_bytes())
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        if names := sorted(name for name in header if name.endswith(".weight_scale")):
            data[8 + length + header[names[0]]["data_offsets"][0]] ^= 1
            path.write_bytes(data)
            return names[0]
    raise SystemExit(f"{folder} has no weight scale to flip")


def self_test(folder, case):
    """Seeds a mistake in a copy of the case; a line of what was found, and whether it was."""
    copy = folder / "seeded"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / case, copy)
    name = flip_scale(copy)
    _, faults = check(copy)
    shutil.rmtree(copy)
    module = name.removesuffix("_scale")
    found = [fault for fault in faults if fault.startswith(module + " ")]
    return f"{case}: a bit of {name} flipped: {found[0] if found else 'NOT FOUND'}", bool(found)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--sabotage", action="store_true", help="flip a bit of a scale in every case first")
    args = parser.parse_args()
    torch.set_num_threads(1)  # The models are tiny: threads would only wait for each other.
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    layout = "{:18} {:12} {:>9} {:>8} {:>9} {:>9} {:>11} {:>9}  {}"
    print(layout.format("model", "recipe", "quantized", "weights", "equal f32", "equal bf16", "logits off", "largest", "verdict"))
    all_faults = []
    for case in args.cases:
        if args.sabotage:
            flip_scale(args.folder / case)
        try:
            cells, faults = check(args.folder / case)
        except Exception as e:  # What the libraries refuse is a fault of the export, and the other cases still count.
            cells, faults = ["-"] * 6, [f"{type(e).__name__}: {e}"]
        verdict = "same" if not faults else f"{len(faults)} faults"
        print(layout.format(*case.split("/"), *cells, verdict), flush=True)
        all_faults += [f"{case}: {fault}" for fault in faults]
    if not args.sabotage:
        print("\nseeded mistakes:")
        for recipe in dict.fromkeys(case.split("/")[1] for case in args.cases):
            case = next(case for case in args.cases if case.endswith("/" + recipe))
            line, found = self_test(args.folder, case)
            print(f"  {line}", flush=True)
            if not found:
                all_faults.append(f"{case}: the check does not see a flipped bit")
    for fault in all_faults:
        print(f"fault: {fault}")
    return 1 if all_faults else 0


if __name__ == "__main__":
    sys.exit(main())
