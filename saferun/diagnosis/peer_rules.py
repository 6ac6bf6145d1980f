"""Rules for ranks that wait for other ranks: in a collective, in the store, on a GPU that does. Pure."""

from __future__ import annotations

from saferun.diagnosis.frames import Calls, last_name
from saferun.diagnosis.rank_view import (
    Found,
    RankView,
    is_at_work,
    library_call,
    library_calls,
    native_call,
    native_calls,
    syscall,
)
from saferun.evidence.job_evidence import Frame

_C10D = Calls(("/torch/distributed/distributed_c10d.py", ()))
_INIT = frozenset(
    set(
        """
        init_process_group new_group new_subgroups new_subgroups_by_enumeration split_group
        _new_process_group_helper _new_group_with_tag _store_based_barrier init_device_mesh
    """.split()
    )
)
_STORE_CALLS = Calls(
    ("/torch/distributed/rendezvous.py", ()),
    ("/torch/distributed/elastic/utils/store.py", ()),
    ("/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py", ()),
)
_STORE_NATIVE = tuple(
    """
    c10d::TCPStore c10d::PrefixStore c10d::FileStore c10d::HashStore c10d::detail::TCPClient
    c10d::ProcessGroupGloo::ProcessGroupGloo gloo::rendezvous::
""".split()
)
_NATIVE_COLLECTIVES = tuple(
    """
    c10d:: gloo:: nccl pncclA rccl MPI_ PMPI_ horovod:: torch::distributed:: deepspeed::
""".split()
)
# Other ways to a collective: what it is called.
_OTHER_COLLECTIVES: tuple[tuple[Calls, str], ...] = (
    (Calls(("/torch/distributed/_functional_collectives.py", ()), ("/torch/distributed/nn/functional.py", ())), ""),
    (Calls(("/torch/distributed/utils.py", ("_verify_param_shape_across_processes",))), "the start of DDP"),
    (
        Calls(("/torch/distributed/utils.py", ("_sync_module_states", "_sync_params_and_buffers"))),
        "DDP's sync of parameters",
    ),
    (Calls(("/torch/nn/parallel/distributed.py", ("_sync_buffers", "_sync_final_model"))), "DDP's sync of buffers"),
    (Calls(("/torch/distributed/algorithms/join.py", ())), "DDP's join"),
    (Calls(("/torch/distributed/rpc/api.py", ())), "torch's RPC"),
    (Calls(("/horovod/torch/mpi_ops.py", ()), ("/horovod/torch/__init__.py", ())), "Horovod"),
)
_BACKWARD = Calls(("/torch/autograd/graph.py", ("_engine_run_backward",)), ("/torch/_tensor.py", ("backward",)))
_BACKWARD_NATIVE = ("c10d::Reducer", "c10d::reducer")
ANY = "a collective"
STORE = "the rendezvous store"
BACKWARD = "DDP's backward"


def found_in_collective(op: str, by: str = "") -> Found:
    """A rank that waits in a collective. ``by``: what has called it where that is not the user."""
    what = f"{op} in {by}" if by and op != ANY else by or op
    return Found("collective", what, f"waits in {what}", of_peers=True)


def _in_store(by: str) -> Found:
    what = f"{STORE} ({by})" if by else STORE
    return Found("network", what, f"waits for {what}", of_peers=True)


def _pending_op(view: RankView) -> str:
    return view.pending or ANY


def in_store(view: RankView) -> Found | None:
    """It waits for a key in the store, or for the others to come to it."""
    c10d = _outermost(view, _C10D)
    by = last_name(c10d.function) if c10d is not None else ""
    if by in _INIT:
        return _in_store(by)
    if library_call(view, _STORE_CALLS) is not None or native_call(view, *_STORE_NATIVE):
        return _in_store(by)
    # Python's stack ends at the line that asks the store; the kernel names the connection.
    if view.process is not None and view.store_port and f":{view.store_port} (" in view.process.waits_on:
        return _in_store(by)
    return None


def _outermost(view: RankView, table: Calls) -> Frame | None:
    """The call with which the user's code, or a library of theirs, has come to a file."""
    found = None
    for frame in library_calls(view):
        if frame in table and not last_name(frame.function).startswith("__"):
            found = frame
    return found


def in_collective(view: RankView) -> Found | None:
    """Python frames show a collective."""
    c10d = _outermost(view, _C10D)
    if c10d is not None:
        op = last_name(c10d.function).lstrip("_")
        return found_in_collective(op if op not in {"wait", "wrapper"} else _pending_op(view))
    for calls, message in _OTHER_COLLECTIVES:
        frame = _outermost(view, calls)
        if frame is not None:
            return (
                found_in_collective(_pending_op(view), message)
                if message
                else found_in_collective(last_name(frame.function))
            )
    return None


def in_native_collective(view: RankView) -> Found | None:
    """Native frames show a collective, as in ``work.wait()``."""
    if native_call(view, *_BACKWARD_NATIVE):
        backward = library_call(view, _BACKWARD) is not None
        return found_in_collective(_pending_op(view), BACKWARD if backward else "DDP's reducer")
    name = native_call(view, *_NATIVE_COLLECTIVES)
    if not name:
        return None
    if name.startswith("ncclComm") or "bootstrap" in name:
        return found_in_collective("the start of NCCL")
    return found_in_collective(view.pending or _op_of_native(view) or ANY)


def _op_of_native(view: RankView) -> str:
    """``all_reduce`` of ``c10d::ProcessGroupGloo::allreduce``."""
    for name in native_calls(view):
        last = name.rpartition("::")[2].lower().replace("_", "").removeprefix("mpi").removeprefix("nccl")
        for op in _OPS:
            if last == op.replace("_", ""):
                return op
    return ""


_OPS = tuple(
    """
    all_reduce all_gather all_to_all barrier broadcast gather monitored_barrier recv reduce reduce_scatter
    scatter send
""".split()
)


def in_backward(view: RankView) -> Found | None:
    """Nothing else in a backward pass sleeps than the thread that waits for it, or for the other ranks."""
    if library_call(view, _BACKWARD) is None or is_at_work(view) or next(native_calls(view), ""):
        return None
    if view.pending:
        return found_in_collective(_pending_op(view), BACKWARD)
    return found_in_collective("the backward pass") if syscall(view) == "futex" else None


def on_gpu(view: RankView) -> Found | None:
    """It waits for its GPU: where a collective of its is not over, for that."""
    name = native_call(view, *_GPU_WAITS) or next(
        (last_name(frame.function) for frame in library_calls(view) if frame in _GPU_CALLS), ""
    )
    if not name:
        return None
    if view.pending:
        return found_in_collective(_pending_op(view))
    return Found("gpu", name, f"waits for its GPU ({name})")


_GPU_WAITS = tuple(
    """
    cudaStreamSynchronize cudaDeviceSynchronize cudaEventSynchronize cuStreamSynchronize cuCtxSynchronize
    cuEventSynchronize cudaMemcpy cuMemcpy hipStreamSynchronize hipDeviceSynchronize hipEventSynchronize
    hipMemcpy c10::cuda:: at::native::_local_scalar_dense_cuda
""".split()
)
_GPU_CALLS = Calls(
    ("/torch/cuda/__init__.py", ("synchronize",)),
    ("/torch/cuda/streams.py", ("synchronize",)),
    ("/torch/xpu/__init__.py", ("synchronize",)),
    ("/torch/accelerator/__init__.py", ("synchronize",)),
)


def in_pending_collective(view: RankView) -> Found | None:
    """It is not known in what the rank waits, and a collective of its own is not over.

    Where it is certain that a collective no longer moves that is enough, whatever library's line it spins in: the
    optimizer, ``clip_grad_norm_``, an ``item()`` in a trainer.
    """
    if not view.pending or view.is_behind or next(native_calls(view), ""):
        return None
    in_user_code = next(library_calls(view), None) is None
    is_stuck = view.hang is not None and view.hang.kind == "stuck_collective" and view.hang.certain
    if (in_user_code and syscall(view) == "futex") or (is_stuck and is_at_work(view)):
        return found_in_collective(_pending_op(view))
    return None
