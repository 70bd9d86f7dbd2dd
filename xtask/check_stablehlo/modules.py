"""StableHLO modules on XLA's CPU devices: text in, arrays out. jaxlib's internals are used, so its version is pinned."""

import json
import re
import struct

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import xla_client

SAFETENSORS = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
ELEMENTS = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E5M2": ml_dtypes.float8_e5m2,
    "f8E8M0FNU": ml_dtypes.float8_e8m0fnu,
    "i64": np.int64,
    "i32": np.int32,
    "i16": np.int16,
    "i8": np.int8,
    "ui8": np.uint8,
    "i1": np.bool_,
}


def read_tensors(path):
    """The tensors of a safetensors file; none for a file that does not exist."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = (8 + length + at for at in entry["data_offsets"])
        raw = np.frombuffer(data[begin:end], np.uint8)
        found[name] = raw.view(SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
    return found


class Group:
    """Devices that run modules together, one replica each."""

    def __init__(self, numbers):
        self.numbers = numbers
        self.devices = [jax.devices()[n] for n in numbers]
        # A "replicated" array whose copies differ: XLA never compares them, so every device has its own shard.
        self.sharding = NamedSharding(Mesh(np.array(self.devices), ("device",)), PartitionSpec())

    def join(self, buffers):
        """One array of the buffers of all devices."""
        return jax.make_array_from_single_device_arrays(buffers[0].shape, self.sharding, buffers)

    def put(self, values):
        """One array of the values of all devices: a list, or one value for all."""
        values = values if isinstance(values, list) else [values] * len(self.devices)
        return self.join(jax.device_put(values, self.devices))


class Module:
    """A compiled module."""

    def __init__(self, text, record, group):
        self.record, self.group = record, group
        replicas = len(group.devices)
        said = int(re.search(r"mhlo\.num_replicas = (\d+)", text)[1])
        if said != replicas or re.search(r"\b(chlo|sdy)\.", text):
            raise ValueError(f"{record['name']} is for {said} replicas, not {replicas}, or uses another dialect")
        names = re.findall(r'rad\.name = "([^"]*)"', text)
        if names != [a["name"] for a in record["arguments"]] + record["results"]:
            raise ValueError(f"{record['name']}: the text has other arguments or results than stablehlo.json")
        options = xla_client.CompileOptions()
        assignment = xla_client.DeviceAssignment.create(np.array(group.numbers).reshape(replicas, 1))
        for where in (options, options.executable_build_options):
            where.num_replicas, where.num_partitions = replicas, 1
            where.device_assignment = assignment
        client = jax.devices()[0].client
        self.executable = client.compile_and_load(text, group.devices, options)

    def run(self, stored, inputs, cache):
        """Runs on arrays `stored`, host values `inputs` and the cache, which is replaced. Returns the outputs of the
        first device; a result that is not the same on all devices is an error."""
        arguments = []
        for a in self.record["arguments"]:
            name, shape, dtype = a["name"], tuple(a["shape"]), np.dtype(ELEMENTS[a["element"]])
            if a["kind"] == "cache":
                value = cache[name]
            elif a["kind"] == "input":
                value = np.asarray(inputs[name]).astype(dtype)
                if value.shape != shape:
                    raise ValueError(f"{name} of {self.record['name']} is {shape}, not {value.shape}")
                value = self.group.put(value)
            else:
                value = stored[name]
            if value.shape != shape or value.dtype != dtype:
                raise ValueError(f"{name} is {value.dtype}{value.shape}, {self.record['name']} takes {dtype}{shape}")
            arguments.append(value)
        results = self.executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
        outputs = {}
        for name, buffers in zip(self.record["results"], results):
            if name in cache:
                cache[name] = self.group.join(buffers)
                continue
            values = [np.asarray(b) for b in buffers]
            if not all(np.array_equal(values[0], v, equal_nan=values[0].dtype.kind == "f") for v in values):
                raise ValueError(f"{name} of {self.record['name']} differs between devices")
            outputs[name] = values[0]
        return outputs


class Folder:
    """An exported folder: its document, its compiled modules, and what every device holds."""

    def __init__(self, path):
        self.document = json.loads((path / "stablehlo.json").read_text())
        self.groups = {}
        self.modules = {}
        for record in self.document["modules"]:
            group = self.groups.setdefault(tuple(record["devices"]), Group(record["devices"]))
            self.modules[record["name"]] = Module((path / record["file"]).read_text(), record, group)
        self.common = read_tensors(path / "args/common.safetensors")
        self.own = [read_tensors(path / f"args/dev{d}.safetensors") for d in range(self.document["devices"])]
        self.host = read_tensors(path / "host.safetensors")

    def stored(self, own):
        """Arrays of what modules read, by group and name; `own` is what each device holds of its own."""
        found = {}
        for record in self.document["modules"]:
            key = tuple(record["devices"])
            arrays = found.setdefault(key, {})
            for a in record["arguments"]:
                if a["kind"] not in ("rank", "weight") or a["name"] in arrays:
                    continue
                values = self.common[a["name"]] if a["common"] else [own[d][a["name"]] for d in key]
                arrays[a["name"]] = self.groups[key].put(values)
        return found

    def empty_cache(self):
        """The cache, zero on all devices."""
        group = self.groups[tuple(range(self.document["devices"]))]
        named = {a["name"]: a for m in self.document["modules"] for a in m["arguments"] if a["kind"] == "cache"}
        return {name: group.put(np.zeros(a["shape"], ELEMENTS[a["element"]])) for name, a in named.items()}
