"""Which operators a provider takes, as far as its documentation says."""

from dataclasses import dataclass

Types = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators of one provider by name, `com.microsoft.` before those of onnxruntime's own.

    `types` are of the first input, for operators that take only some, `opset` is the newest of ONNX whose operators it knows,
    `source` the documentation.
    """

    source: str
    names: frozenset[str]
    types: tuple[tuple[str, Types], ...] = ()
    opset: int = 23

    def takes(self, name: str) -> bool:
        return name in self.names

    def takes_type(self, name: str, dtype: str) -> bool:
        known = dict(self.types).get(name)
        return known is None or dtype in known


def names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


# Reciprocal adds 1e-4: graphs here have Div.
CORE_ML = Operators(
    "registered for MLProgram by onnxruntime 1.28 to 1.32: coreml_supported_mlprogram_ops.md in its package, and Gather, Pad, "
    "BatchNormalization, ReduceMin and ReduceProd, which that list leaves out",
    names("""
    Add And ArgMax AveragePool BatchNormalization Cast Ceil Clip Concat Conv ConvTranspose Cos DepthToSpace Div Elu Erf Exp
    Gather GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool GridSample GroupNormalization HardSigmoid Identity
    InstanceNormalization LayerNormalization LeakyRelu MatMul Max MaxPool Mul PRelu Pad Pow Reciprocal ReduceMax ReduceMean
    ReduceMin ReduceProd ReduceSum Relu Reshape Resize Round Shape Sigmoid Sin Slice Softmax Softplus Split Sqrt Squeeze Sub
    Tanh Tile Transpose Unsqueeze Where
    """),
)

FLOATS = ("float32", "float16")

# DirectML knows an operator by the very version in which it last changed: Cast, Reshape, Transpose, Squeeze and Unsqueeze of
# opset 23 would all run on the CPU. Left out: what is gone by opset 20 (ScatterND), and SimplifiedLayerNormalization, which
# gave wrong logits on one of its devices (microsoft/onnxruntime#29739).
DIRECT_ML = Operators(
    "onnxruntime, docs/OperatorKernels.md, DmlExecutionProvider, and OperatorRegistration.cpp of its providers/dml (1.30.0)",
    names("""
    Abs Acos Acosh Add Affine And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization BitShift BitwiseAnd
    BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu Clip Col2Im Concat ConcatFromSequence ConstantOfShape Conv
    ConvInteger ConvTranspose Cos Cosh Crop CumSum DFT DepthToSpace DequantizeLinear Div DynamicQuantizeLinear Einsum
    Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND Gemm GlobalAveragePool
    GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GroupNorm HardSigmoid Hardmax Identity If ImageScaler
    InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax
    LpNormalization LpPool MatMul MatMulInteger Max MaxPool MaxRoiPool MaxUnpool Mean MeanVarianceNormalization Min Mod
    Mul Neg NonZero Not OneHot OptionalGetElement OptionalHasElement Or PRelu Pad ParametricSoftplus Pow QLinearConv
    QLinearMatMul QuantizeLinear RNN Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
    ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign Round STFT
    ScaledTanh Scatter Selu SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength Shape
    Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh
    ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor com.microsoft.Attention com.microsoft.BiasAdd
    com.microsoft.BiasGelu com.microsoft.BiasSplitGelu com.microsoft.ConvTransposeWithDynamicPads
    com.microsoft.DequantizeLinear com.microsoft.DynamicQuantizeMatMul com.microsoft.EmbedLayerNormalization
    com.microsoft.FastGelu com.microsoft.FusedMatMul com.microsoft.FusedMatMulActivation com.microsoft.Gelu
    com.microsoft.GroupNorm com.microsoft.GroupQueryAttention com.microsoft.MatMulIntegerToFloat
    com.microsoft.MatMulNBits com.microsoft.MultiHeadAttention com.microsoft.NhwcConv com.microsoft.QAttention
    com.microsoft.QLinearAdd com.microsoft.QLinearAveragePool com.microsoft.QLinearConcat
    com.microsoft.QLinearGlobalAveragePool com.microsoft.QLinearSigmoid com.microsoft.QuantizeLinear
    com.microsoft.QuickGelu com.microsoft.RotaryEmbedding com.microsoft.SkipLayerNormalization
    """),
    types=(
        *((name, FLOATS) for name in ("MatMul", "Softmax", "Sqrt", "Sigmoid", "Exp", "Reciprocal", "Tanh", "Erf", "Log")),
        *((f"com.microsoft.{name}", FLOATS) for name in ("MatMulNBits", "FusedMatMul", "RotaryEmbedding")),
        ("Pow", (*FLOATS, "int32")),
    ),
    opset=20,
)

# It claims SimplifiedLayerNormalization, and leaves RMSNormalization to the CPU though its front end could read it.
OPENVINO = Operators(
    "onnxruntime-ep-openvino 1.8.1, the names in its library; run on its CPU device for those that our graphs have",
    names("""
    Abs Acos Acosh Add Affine And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization BitShift BitwiseAnd
    BitwiseNot BitwiseOr BitwiseXor BlackmanWindow Cast CastLike Ceil Celu Clip Compress Concat Constant ConstantFill
    ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh Crop CumSum DFT DepthToSpace DequantizeLinear Div Dropout
    DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND Gelu
    Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HammingWindow
    HardSigmoid HardSwish Hardmax Identity If ImageScaler InstanceNormalization IsFinite IsInf IsNaN LRN LSTM
    LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Loop LpNormalization MatMul MatMulInteger Max MaxPool
    MaxRoiPool Mean MeanVarianceNormalization Min Mish Mod Mul Multinomial Neg NonMaxSuppression NonZero Not OneHot Or
    PRelu Pad Pow QuantizeLinear RNN RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal
    ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
    Relu Reshape Resize ReverseSequence RoiAlign Round STFT Scan Scatter ScatterElements ScatterND Selu Shape Shrink
    Sigmoid Sign SimplifiedLayerNormalization Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt
    Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK Transpose Trilu Unique Unsqueeze Upsample Where Xor
    com.microsoft.Attention com.microsoft.BiasGelu com.microsoft.EmbedLayerNormalization com.microsoft.FusedGemm
    com.microsoft.FusedMatMul com.microsoft.GatherBlockQuantized com.microsoft.MatMulIntegerToFloat
    com.microsoft.MatMulNBits com.microsoft.MultiHeadAttention com.microsoft.QuickGelu com.microsoft.RotaryEmbedding
    com.microsoft.SkipLayerNormalization com.microsoft.SkipSimplifiedLayerNormalization
    """),
)
