"""Classifies operators and kernels into kinds of work by their names."""

import re
from functools import cache

COMPUTE = ("matmul", "attention", "elementwise", "optimizer")
HOST = ("views", "autograd", "python", "waiting", "no kernel")  # "no kernel": the GPU is idle

_ELEMENTWISE = (
    r"mul|add|r?sub|div|neg|abs|pow|exp|log|r?sqrt|sin|cos|tanh|sigmoid|silu|gelu|relu|reciprocal|clamp\w*|addcmul|"
    r"addcdiv|lerp|where|eq|ne|ge|gt|le|lt|logical_\w+|bitwise_\w+|__\w+__|isfinite|isnan|sum|mean|prod|cumsum|a?max|"
    r"a?min|arg\w+|any|all|(linalg_vector_)?norm|_?(log_)?softmax|logsumexp|(nll_loss|cross_entropy)\w*|\w*rms_norm|"
    r"(native_)?layer_norm|maximum|minimum|arange|sort|floor_divide|remainder|random|normal|uniform"
)
_COPIES = (
    r"copy|_to_copy|clone|cat|stack|fill|zero|index\w*|_index_put_impl|gather|scatter\w*|embedding\w*|masked_\w+|roll|"
    r"constant_pad_nd|triu|tril|repeat|flip|bincount|nonzero"
)
_VIEWS = (
    r"view\w*|_unsafe_view|_?reshape\w*|t|transpose|permute|slice|select|as_strided|expand\w*|unsqueeze|squeeze|"
    r"(unsafe_)?split\w*|chunk|unbind|narrow|detach|alias|(un)?flatten|contiguous|to|type_as|empty\w*|new_\w+|resize|"
    r"set|zeros\w*|ones\w*|full\w*|scalar_tensor|item|_local_scalar_dense|is_nonzero|result_type|lift_fresh|matmul|"
    r"linear|square|movedim|broadcast_\w+|numpy_T|requires_grad|resolve_\w+|promote_types|_has_\w+"
)

# kind -> pattern. A name belongs to the first kind whose pattern matches the whole name.
OPERATORS = {
    "attention": r"aten::\w*(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)\w*",
    "optimizer": r"aten::_(fused|foreach)_\w+",
    "communication": r"(c10d|_c10d_functional|_dtensor)::.*|(gloo|nccl):.*|record_param_comms|wait for .*|"
    r"FSDP::.*",  # PyTorch's FSDP waits in these
    "matmul": r"aten::(addmm|mm|bmm|baddbmm|mv|addmv|dot|vdot|_scaled_mm|_addmm_activation|mkldnn_\w+)_?|mkldnn\w*::.*",
    "copies": rf"aten::({_COPIES})_?(backward)?",
    "elementwise": rf"aten::({_ELEMENTWISE})_?(_?backward)?(_data)?|(graph_\d+_)?cpp_fused_\w+",
    "views": rf"aten::({_VIEWS})_?",  # and operators that only call another operator
    "compiled": r"Torch-Compiled Region.*|\w*Compiled\w*|.*CompiledFxGraph.*",  # compiled code and its wrapper
    "python": r"step|Optimizer\..*|Profiler\w+.*|## .*",  # annotations: their own time is spent in Python
    "waiting": r"waiting for .*",  # for data or the result of a step
    "autograd": r"autograd::.*|torch::(autograd|dynamo|jit)::.*|\w+",  # autograd engine, nodes, ndtrain's Functions
}
GPU_KERNELS = {
    "no kernel": r"no kernel",
    "communication": r".*nccl.*",
    "attention": r".*(flash|fmha|attention|sdpa|cudnn::fusion).*",
    # A kernel with random bits and a square root is the update that rounds its moments to bf16.
    "optimizer": r".*(multi_tensor_apply|fused_?adam|foreach).*|triton_\w+_bitwise_xor_\w+_sqrt_\w+",
    "matmul": r".*(gemm|gemv|cutlass|cublas|nvjet|wgmma|splitk|triton_tem|_mm_).*",
    "copies": r"(?!triton).*(memcpy|memset|copy|catarray|index|gather|scatter|fill|embedding|sort|scan).*",
    "elementwise": r".*(elementwise|triton|reduce|softmax|norm|vectorized|distribution).*",
}
_TABLES = {"cpu": OPERATORS, "cuda": GPU_KERNELS}


@cache
def kind_of(name: str, device: str) -> str:
    """Return the kind of an operator (`device`=cpu) or of a GPU kernel (cuda), or `unnamed` if no pattern matches."""
    for kind, pattern in _TABLES[device].items():
        if re.fullmatch(pattern, name, re.IGNORECASE if device == "cuda" else 0):
            return kind
    return "unnamed"
