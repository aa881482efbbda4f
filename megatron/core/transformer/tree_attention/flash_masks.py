"""The masks of the flash backend as CuTe code. Imports CUTLASS: import it where flash-attn-4 is needed only.

``reach`` of a key is ``subtree_end[key] - key``, so that one unsigned comparison tells both ends of the
interval: key <= query < subtree_end[key]. Indices are Int32 vectors of one element.

The values are read by inline PTX without side effects. flash-attn-4 uses an element of the mask on one side
of a branch (is the element inside the sequence?), and the compiler moves an ordinary load there, with its
address: in tiles that have the branch every element then waits for a load of its own. Assembly stays where it
is, so a thread loads what its keys need once, ahead of the matrix product. Compiled for sm_90a with head size
128, instructions between S and P of a partial tile: backward 999 -> 417 (216 without a mask), forward
745 -> 605, and 1156 -> 807 in the first tile of a row (405 without a mask).
"""

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from flash_attn.cute.utils import scalar_to_ssa


@dsl_user_op
def _load(tensor, index, *, loc=None, ip=None):
    """tensor[index] of an int32 tensor that nothing writes while the kernel runs."""
    address = (tensor.iterator + index).toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    return cutlass.Int32(
        llvm.inline_asm(
            T.i32(),
            [address],
            "ld.global.nc.b32 $0, [$1];",
            "=r,l",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@cute.jit
def tree(batch, head, query, key, seqlen_info, aux_tensors):
    """aux_tensors: reach int32 [T]."""
    reach = scalar_to_ssa(_load(aux_tensors[0], key[0]), cutlass.Int32)
    return (query - key).to(cutlass.Uint32) < reach.to(cutlass.Uint32)


def tree_and_window(window: int):
    """The mask under a window, which is compiled in."""

    @cute.jit
    def mask(batch, head, query, key, seqlen_info, aux_tensors):
        """aux_tensors: reach int32 [T], position int32 [T]."""
        reach = scalar_to_ssa(_load(aux_tensors[0], key[0]), cutlass.Int32)
        farthest = scalar_to_ssa(_load(aux_tensors[1], key[0]) + window, cutlass.Int32)
        position = scalar_to_ssa(_load(aux_tensors[1], query[0]), cutlass.Int32)
        return ((query - key).to(cutlass.Uint32) < reach.to(cutlass.Uint32)) & (position <= farthest)

    return mask
