"""run.json: what a launch was asked to do, by which process and with which versions, and how it ended. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from saferun import __version__
from saferun.config import LaunchConfig
from saferun.model import JsonObject, Value
from saferun.text.redaction import REDACTED, redacted_arguments, redacted_environ, redacted_path, redacted_text
from saferun.text.secret_names import is_secret

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.linux.process_identity import ProcessIdentity
    from saferun.report.report_json import Outcome

_LONGEST_HEADLINE = 400
_LONGEST_VALUE = 4096
# Of the software that ranks use, and what says where it is.
_SHOWN_PREFIXES = (
    *("TORCH", "PYTORCH_", "KINETO_", "ATEN_", "FBGEMM_", "GLOO_", "TP_SOCKET_", "NCCL_", "RCCL_", "NVSHMEM_"),
    *("CUDA", "CUBLAS", "CUDNN_", "NVIDIA_", "HIP", "AMD_", "HSA_", "ROCR_", "ROCM_", "ROC_", "ROCBLAS_", "MIOPEN_"),
    *("UCX_", "UCC_", "FI_", "OMPI_", "PMIX_", "OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_"),
    *("XLA_", "PJRT_", "TRITON_", "LD_", "MALLOC_", "PYTHON", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "LC_"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_", "DEEPSPEED_", "TOKENIZERS_", "HF_HUB_OFFLINE", "DS_"),
)
_OF_ONE_RANK = frozenset({"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_TIMER_FILE"})


class LaunchEnd(Value):
    """How a launch ended. ``time`` is in seconds since the epoch; ``headline`` is that of the last incident."""

    time: float
    exit_code: int
    outcome: Outcome
    headline: str = ""


def run_description(
    config: LaunchConfig,
    *,
    cwd: str,
    run_id: str,
    host: str,
    hostname: str,
    process: ProcessIdentity,
    started_at: float,
    directory: str,
    python_version: str,
    torch_version: str | None,
    environment: Mapping[str, str] | None = None,
    slow: Sequence[JsonObject] = (),
    control_socket: str = "",
    slurm_job: str = "",
    end: LaunchEnd | None = None,
) -> JsonObject:
    """The content of run.json.

    Args:
        config: the launch.
        cwd: the directory that it was started in.
        run_id: what marks its processes.
        host: the name of this host's directory, which is its name in the job where that is one of a file.
        hostname: what it calls itself.
        process: the supervisor.
        started_at: seconds since the epoch.
        directory: the name of the run directory; empty where the user chose it.
        python_version: of the interpreter that runs saferun.
        torch_version: known once the coordinator has loaded it.
        environment: of a rank, as ``shown_environment`` returns it; None: none has been started.
        slow: ranks that the others waited for.
        control_socket: the path of the socket at which this process answers saferunctl; empty: there is none.
        slurm_job: the id of the job of Slurm that it belongs to; empty: of none.
        end: None while it runs.
    """
    return {
        "command": redacted_arguments(config.argv),
        "rank_command": redacted_arguments(config.command.argv),
        "cwd": redacted_path(cwd),
        "run_id": run_id,
        "rendezvous_id": redacted_text(config.rendezvous.run_id),
        "nproc_per_node": config.nproc_per_node,
        "settings": {
            # A default is in the table of options.
            name: {
                "value": setting.value if setting.origin == "default" else _shown(name, setting.value),
                "origin": setting.origin,
            }
            for name, setting in config.settings.items()
        },
        "versions": {"saferun": __version__, "python": python_version, "torch": torch_version},
        "prefix": _prefix(config, hostname),
        "environment": dict(environment) if environment is not None else None,
        "slow_ranks": [*slow],
        "host": host,
        "process": process._asdict(),
        "started_at": started_at,
        "directory": directory,
        "control_socket": control_socket,
        "slurm_job": slurm_job,
        "end": _end(end) if end is not None else None,
    }


def shown_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What of a rank's environment run.json shows: what changes how it computes and talks, without secrets."""
    names = sorted(name for name in environ if name.startswith(_SHOWN_PREFIXES) and name not in _OF_ONE_RANK)
    return {
        name: value[:_LONGEST_VALUE]
        for name, value in redacted_environ({name: environ[name] for name in names}).items()
    }


def run_text(content: JsonObject) -> str:
    """The description as JSON, with a line for each setting: a tenth of the time of ``json.dumps(…, indent=1)``."""
    lines = (
        f" {json.dumps(name)}: {_object_text(value) if name == 'settings' else json.dumps(value, default=str)}"
        for name, value in content.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _object_text(content: JsonObject) -> str:
    lines = (f"  {json.dumps(name)}: {json.dumps(value, default=str)}" for name, value in content.items())
    return "{\n" + ",\n".join(lines) + "\n }"


def _prefix(config: LaunchConfig, hostname: str) -> JsonObject:
    """What the prefixes of the console's lines are made of; ``template`` null: there are none."""
    template = config.output.prefix if config.output.prefix is not None else config.output.legacy_template
    return {
        "template": redacted_text(template) if template is not None else None,
        "is_legacy": config.output.prefix is None,
        "role": redacted_text(config.role),
        "hostname": hostname,
    }


def _end(end: LaunchEnd) -> JsonObject:
    headline = redacted_text(end.headline[:_LONGEST_HEADLINE])
    return {"time": end.time, "exit_code": end.exit_code, "outcome": end.outcome, "headline": headline}


def _shown(name: str, value: object) -> object:
    if is_secret(name):
        return REDACTED
    if isinstance(value, list | tuple):
        return redacted_arguments(map(str, value))
    return redacted_text(value) if isinstance(value, str) else value
