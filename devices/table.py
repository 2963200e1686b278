"""The rows: every device a bundle can be made for, each oddity with its reason."""

from dataclasses import replace

from specedge.devices.device import Catalog, Device, Package, Plugin, Soc
from specedge.devices.operators import CORE_ML, DIRECT_ML, OPENVINO
from specedge.errors import SpecedgeError

# SmolLM2-135M in INT4 on two cores with AVX512-VNNI, 128 to 512 tokens of past: between its exact Q4_1 grid (1.17, 1.33, 1.67,
# 2.3, 3.5) and one of round to nearest (1.2, 1.4, 1.8, 2.5, 4.0).
_IN_PLACE_COST = ((1, 1.0), (2, 1.2), (3, 1.37), (5, 1.73), (9, 2.4), (17, 3.7))
_STATIC_COST = ((1, 1.0), (2, 1.3), (4, 1.8), (5, 2.1), (8, 2.7), (12, 3.3), (16, 4.1))

# Large enough that exp() of a masked score is 0 beside any real one, small enough that score + mask stays finite in float16.
_CPU_MASK = -30000.0

CPU = "CPUExecutionProvider"
"""The provider that every machine has."""

_ANE_WIDEST = 16384  # the largest dimension that the Neural Engine takes

_EXECUTORCH = "pytorch/executorch, backends/qualcomm/serialization/qc_schema.py"
_QNN = Plugin(
    package="onnxruntime_qnn",
    sdk="build_and_package_info.qnn_version",
    extra="qnn",
    options=(
        ("backend_type", "htp"),
        ("enable_htp_fp16_precision", "1"),  # what little is float32 in a graph is computed in float16 too
    ),
    soc_options=(("soc_model", "{model}"), ("htp_arch", "{architecture}")),  # float16 needs to know the SoC
    hardware_options=(("htp_performance_mode", "burst"),),  # a step lasts milliseconds: no time to clock up in between
    compile_options=(("htp_graph_finalization_optimization_mode", "3"),),  # minutes once, for every step afterwards
    diagnosis=(("enable_framework_op_trace", "1"), ("framework_op_trace_dir", "{folder}")),
    socs=(
        Soc("SM8650", 57, 75, _EXECUTORCH),  # Snapdragon 8 Gen 3
        Soc("SM8750", 69, 79, _EXECUTORCH),  # Snapdragon 8 Elite
        Soc("SM8850", 87, 81, _EXECUTORCH),  # Snapdragon 8 Elite Gen 5
        Soc("SM8550", 43, 73, _EXECUTORCH),  # Snapdragon 8 Gen 2
        Soc("SC8380XP", 60, 73, "onnxruntime-qnn, docs/execution_providers/QNN-ExecutionProvider.md"),  # Snapdragon X Elite
    ),
)

_OPENVINO = Plugin(
    package="onnxruntime_ep_openvino",
    extra="openvino",
    # On a CPU it would compute in bfloat16 and round activations to int8: errors of 5e-3, where these leave 1e-6.
    options=(("load_config", '{{"CPU": {{"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}}}}'),),
)

# VitisAI takes models of INT8 or bfloat16 only, none of these.
_WINDOWS_ML = Catalog(
    package="windowsml",
    extra="windowsml",
    providers=(
        "QNNExecutionProvider",
        "OpenVINOExecutionProvider",
        "NvTensorRTRTXExecutionProvider",
        "MIGraphXExecutionProvider",
    ),
    kinds=("NPU", "GPU"),
)

# Apple's Neural Engine. It is wrong on, or leaves, 4-bit weights with several scales in a row.
_ANE = Device(
    "coreml-ane",
    "CoreML",
    "delta",
    static=True,
    mask_value=-10000.0,  # infinity, and what overflows to it, turns into NaN there
    accuracy_level=0,
    widest_block=128,
    dtype="float16",
    embeds=True,  # a lookup in a table of more than 16,384 rows would leave the Neural Engine
    widest_output=_ANE_WIDEST,
    ragged=False,
    pads=True,
    zero_points=True,
    prepares=False,
    one_call=False,
    default_widths=(1, 5),
    verify_cost=_STATIC_COST,  # assumed, until one is measured on a Mac
    verified="numbers, by an evaluator of the saved package; never on a Mac",
    package=Package("CPU_AND_NE", "iOS18", 15, _ANE_WIDEST, blocks=False),
)

# A GPU of any maker, on Windows. GroupQueryAttention is left out: its bias, and queries of several rows behind a past, are not
# DirectML's. It multiplies 4-bit weights after making floats of them, so they save memory and not time (8.8 tokens/s against
# 46.8 on one device). A graph recorded once would replay faster, but gave wrong logits on some devices, says
# onnxruntime-genai, which leaves it off.
_DIRECT_ML = Device(
    "directml",
    "DmlExecutionProvider",
    "delta",
    static=True,
    mask_value=-10000.0,
    accuracy_level=0,
    widest_block=32,
    dtype="float16",
    embeds=True,  # it has no GatherBlockQuantized
    widest_output=None,
    ragged=False,  # "K % block_size == 0"
    pads=True,
    zero_points=True,
    prepares=False,
    one_call=False,
    default_widths=(1, 5),
    verify_cost=_STATIC_COST,  # assumed, until one is measured on a GPU
    verified="numbers of the graphs, on the CPU provider; never on Windows",
    operators=DIRECT_ML,
    options=(("performance_preference", "high_performance"),),  # of two GPUs the faster
    float32=True,
    plans_memory=False,  # the provider's documentation: no memory pattern, one operator after the other
)

_ROWS = (
    # GroupQueryAttention writes into shared past/present buffers: nothing is copied, one graph serves every width.
    # A width costs nothing here, so there is one for long copies too. Without int8 activations a step of two tokens costs 2.7
    # steps of one; they are safe because this form gives the same bits at every width.
    Device(
        "cpu",
        CPU,
        "in-place",
        static=False,
        mask_value=_CPU_MASK,
        accuracy_level=4,
        # Kernels of larger blocks sum a single row in another order than several: 2e-7, which int8 activations turn into 0.1
        # and more of a logit. Of these every width gives the same bits.
        widest_block=32,
        dtype="float32",
        embeds=False,
        widest_output=None,
        ragged=True,
        pads=True,
        zero_points=True,
        prepares=True,
        # Steps in place cost little more than their weights, and the graph of one call has to copy the cache at every level:
        # drafts of SmolLM2's width and 2, 8 and 30 layers took 1.02, 1.14-1.5 and 1.13-1.18 of single steps.
        one_call=False,
        default_widths=(1, 5, 9, 17),
        verify_cost=_IN_PLACE_COST,
        verified="numbers and times, on this provider",
    ),
    # The graph form of every NPU, on the provider every machine has: what it computes can be checked anywhere. New columns lie
    # in other slots than cached ones, so widths sum in another order; int8 activations blow that last bit up to logits that
    # differ by 1.5 (SmolLM2-135M), float32 ones keep it at 1e-4.
    Device(
        "cpu-static",
        CPU,
        "delta",
        static=True,
        mask_value=_CPU_MASK,
        accuracy_level=1,
        widest_block=128,  # the largest there is
        dtype="float32",
        embeds=False,
        widest_output=None,
        ragged=True,
        pads=True,
        zero_points=True,
        prepares=False,  # each of its graphs would keep a file of its own, and at this level nothing is reordered for speed
        one_call=True,  # a call of an NPU costs more than what it computes
        default_widths=(1, 5, 9),
        verify_cost=_STATIC_COST,
        verified="numbers and times, on this provider",
    ),
    # Qualcomm's NPU. 4-bit blocks with float16 activations need no calibration of activations; minima become products of block
    # sums. It does not take GatherBlockQuantized ("GPU backend only"): the host looks embeddings up.
    Device(
        "qnn",
        "QNNExecutionProvider",
        "delta",
        static=True,
        mask_value=-1000.0,  # more costs precision where masks are added in 16 bits
        accuracy_level=0,
        widest_block=32,
        dtype="float16",
        embeds=True,
        # SmolLM2's LM head, 49,152 rows in INT8: 29 s to compile as one product, 6 s as 3, 1.5 s as 12; joined again in the
        # graph it does not fit the NPU's memory at all.
        widest_output=4096,
        ragged=False,  # "K must be divisible by block_size"
        # A float16 Pad leaves garbage in its columns, a Concat of 176 and 16 columns is wrong from 8 rows on (QNN 2.51).
        pads=False,
        zero_points=True,  # by block sums SmolLM2's first two layers take 1.4 % more, and more nodes
        prepares=False,
        one_call=False,
        default_widths=(1, 5),
        verify_cost=_STATIC_COST,  # assumed, until one is measured on a chip
        verified="numbers, in its emulator; never on a chip",
        plugin=_QNN,
    ),
    _ANE,
    # The GPU of a Mac, or of a phone.
    replace(_ANE, name="coreml-gpu", widest_output=None, package=Package("CPU_AND_GPU", "iOS18", 15, None, blocks=True)),
    # Core ML behind onnxruntime: a fallback for float models. The provider takes none of onnxruntime's own operators, no
    # RMSNormalization and no Expand.
    Device(
        "coreml-ep",
        "CoreMLExecutionProvider",
        "delta",
        static=True,
        mask_value=-10000.0,
        accuracy_level=0,
        widest_block=128,
        # In float16 with RequireStaticInputShapes it was wrong on macOS 15 (microsoft/onnxruntime#32569, open).
        dtype="float32",
        embeds=True,
        widest_output=_ANE_WIDEST,
        ragged=True,
        pads=True,
        zero_points=False,
        prepares=False,
        one_call=False,
        default_widths=(1, 5),
        verify_cost=_STATIC_COST,  # assumed, until one is measured on a Mac
        verified="numbers of the graphs, on the CPU provider; never on a Mac",
        contrib=False,
        operators=CORE_ML,
        options=(
            ("ModelFormat", "MLProgram"),
            ("MLComputeUnits", "ALL"),
            ("RequireStaticInputShapes", "1"),
            ("ModelCacheDirectory", "{cache}"),  # its own keys know neither the weights nor the version
        ),
    ),
    # Intel's NPUs, GPUs and CPUs: what is here, in this order. NPUs want static shapes and symmetric 4 bits; whether they take
    # 8-bit tables nobody says, so the host looks embeddings up.
    replace(
        _DIRECT_ML,
        name="openvino",
        provider="OpenVINOExecutionProvider",
        zero_points=False,
        verified="numbers and times, on its CPU device, an Intel processor; never on an Intel NPU or GPU",
        operators=OPENVINO,
        options=(),
        plans_memory=True,
        plugin=_OPENVINO,
    ),
    _DIRECT_ML,
    # What Windows keeps for the hardware at hand: an NPU before a GPU. The graphs of DirectML, with logits in pieces and rows
    # filled up without a Pad for Qualcomm's provider; that and OpenVINO's took them whole, the others nobody asked.
    replace(
        _DIRECT_ML,
        name="windowsml",
        provider="Windows ML",
        mask_value=-1000.0,
        widest_output=4096,
        pads=False,
        zero_points=False,
        verified="numbers of the graphs, on the CPU provider; never on Windows",
        options=(),
        plans_memory=True,
        float32=False,  # NPUs do not
        catalog=_WINDOWS_ML,
    ),
)

DEVICES = {row.name: row for row in _ROWS}


def twin(device: Device) -> Device:
    """What computes a device's graphs anywhere: the row that runs them on the CPU, or the evaluator of packages."""
    if device.package:
        return replace(device, package=replace(device.package, evaluated=True))
    return next(row for row in _ROWS if row.provider == CPU and row.form == device.form)


def get_device(name: str) -> Device:
    """The row called `name`; an unknown name is refused with the names there are."""
    if name not in DEVICES:
        raise SpecedgeError(f"device {name!r}: this version has no such row; use one of {', '.join(DEVICES)}")
    return DEVICES[name]
