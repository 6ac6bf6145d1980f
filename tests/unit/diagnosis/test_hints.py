"""What is advised for an exception that no rule knows: by what its message says, and not by a word of a name in it."""

from __future__ import annotations

import pytest

from saferun.diagnosis.causes.hints import VERSIONS, hint_for

CHECKPOINT = "the checkpoint fits this model"
NOT_WHOLE = "the checkpoint does not fit the model, or is not whole"
BROKEN = "a file that it reads is broken"
WEIGHTS = "torch.load reads only weights"


@pytest.mark.parametrize(
    "line",
    [
        "OSError: [Errno 39] Directory not empty: '/ckpt/tmp'",
        "IsADirectoryError: [Errno 21] Is a directory: 'checkpoint'",
        "AttributeError: 'Namespace' object has no attribute 'ckpt'",
        "AttributeError: 'NoneType' object has no attribute 'state_dict'",
        "TypeError: load() got an unexpected keyword argument 'weights_only'",
        "KeyError: 'state_dict'",
        "ValueError: MyModel does not support gradient checkpointing or loading in 8 bits",
        "ValueError: this layer does not support gradient checkpoint",
        "ValueError: Output directory (/out/checkpoints) already exists and is not empty. Use --overwrite_output_dir.",
        "RuntimeError: the shards in /data/checkpoints/old do not match",
        "ValueError: could not save the checkpoint: the name is too long",
        "RuntimeError: the checkpoint is already written",
    ],
)
def test_a_checkpoint_in_a_name_is_not_said_to_be_broken(line: str) -> None:
    """People delete what is said to be broken."""
    assert hint_for((line,)) == ""


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: Missing optimizer state for parameter '1.weight' in checkpoint. It requires gradients.",
        "RuntimeError: Missing key in checkpoint state_dict: module.decoder.layers.self_attention.q_layernorm",
        "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 8 but the current world size is 16.",
        "RuntimeError: Failed to load checkpoint from '/out/checkpoint-500'",
        "ValueError: The checkpoint you are trying to load has model type `transformer`",
        "ValueError: could not restore the state from the checkpoint /out/ckpt",
        "RuntimeError: state_dict has unexpected keys",
        "RuntimeError: Couldn't load the checkpoint: it doesn't fit",
        "AssertionError: rank 0: checkpoint args hidden_size value (4096) is not equal to the argument value (2048).",
        "ValueError: Checkpoint was written with tensor parallel size 8, expected 4",
        "ValueError: Unrecognized checkpoint format",
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_told_so_as_before(line: str) -> None:
    assert hint_for((line,)).startswith(CHECKPOINT)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("FileExistsError: [Errno 17] File exists: '/tmp/x/out/checkpoints'", "exist_ok=True"),
        ("FileExistsError: [Errno 17] File exists: '/data/video_decode'", "exist_ok=True"),
        ("_pickle.UnpicklingError: Weights only load failed. This file can still be loaded.", WEIGHTS),
        ("RuntimeError: Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``.", WEIGHTS),
        ("ValueError: No valid checkpoint found in output directory (/out)", "there is no checkpoint to resume from"),
        ("ValueError: Can't find a valid checkpoint at ./out", "there is no checkpoint to resume from"),
        ("RuntimeError: Could not find checkpoint at /x/y", "there is no checkpoint to resume from"),
        ("RuntimeError: Checkpoint file /x/y.pt not found", "there is no checkpoint to resume from"),
        ("OSError: out/checkpoint-500 does not appear to have a file named config.json.", "the model's name or path"),
        ("RuntimeError: nvshmem: failed to allocate 64 bytes in the symmetric heap", "NVSHMEM_SYMMETRIC_SIZE"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "another process holds the lock"),
        ("AttributeError: partially initialized module 'torch' has no attribute 'nn' (circular)", "import each other"),
        ("AttributeError: module 'numpy' has no attribute 'bool'", VERSIONS),
        ("RuntimeError: Expected to mark a variable ready only once. This error is caused by", "use_reentrant=False"),
        ("Exception: Current loss scale already at minimum - cannot decrease scale anymore.", "bfloat16"),
        ("FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.", "bfloat16"),
        ("RuntimeError: One of the subprocesses has abruptly died during map operation.To debug", "num_proc"),
    ],
)
def test_what_helps_against_others_is_told(line: str, words: str) -> None:
    assert words in hint_for((line,))


def test_a_checkpoint_of_another_model_is_not_a_broken_file() -> None:
    """Names of parts of a model stand below."""
    message = (
        "RuntimeError: Error(s) in loading state_dict for VideoMAE:",
        '\tMissing key(s) in state_dict: "image_encoder.conv.weight", "decoder.weight". invalid',
    )
    assert hint_for(message).startswith(NOT_WHOLE)
    assert hint_for(("RuntimeError: PytorchStreamReader failed reading zip archive",)).startswith(NOT_WHOLE)


@pytest.mark.parametrize(
    "line",
    [
        "AttributeError: 'VideoMAEForPreTraining' object has no attribute 'decoder'",
        "TypeError: ImageEncoder.forward() got an unexpected keyword argument 'decoder_input_ids'",
        "TypeError: ImageProcessor.decode() got an invalid argument",
        "RuntimeError: rank 3: parameters in shard 2 do not match",
        "RuntimeError: parameters do not match in shard 2.",
        "RuntimeError: the image tower has no decoder_layers",
        "ValueError: cannot find a decoder of this size",
    ],
)
def test_a_part_of_a_model_is_no_file(line: str) -> None:
    assert hint_for((line,)) == ""


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: image decoding failed",
        "OSError: image 7 could not be read: decoder error -2",
        "ValueError: Failed to decode /data/clip.mp4",
        "RuntimeError: Video file 'a.mp4' is invalid",
        "ValueError: no sample in shard /data/train-0003.tar",
        "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f>",
    ],
)
def test_a_file_that_cannot_be_decoded_is_told_as_before(line: str) -> None:
    assert hint_for((line,)).startswith(BROKEN)


def test_only_a_screen_is_no_screen() -> None:
    assert hint_for(("RuntimeError: Cannot connect to server at reward-node:8000",)) == ""
    for line in ("Cannot connect to X server :0", "cannot open display: :1", "Cannot connect to display"):
        assert "there is no screen" in hint_for((f"RuntimeError: {line}",))


def test_a_kernel_of_the_users_that_has_an_error_is_no_missing_compiler() -> None:
    own = hint_for(("triton.compiler.errors.CompilationError: at 12:4:", "    x = tl.load(p)", "NameError('p')"))
    assert "the source of a Triton kernel" in own
    assert "headers" not in own
    for line in (
        "torch._inductor.exc.InductorError: CalledProcessError: Command",
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
    ):
        assert "headers" in hint_for((line,))


def test_text_that_is_no_json_may_be_of_any_place() -> None:
    """Not only of the configuration."""
    for line in (
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "requests.exceptions.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    ):
        advice = hint_for((line,))
        for word in ("data set", "configuration", "service"):
            assert word in advice
    assert hint_for(("omegaconf.errors.ConfigKeyError: Key 'lr' is not in struct",)).startswith("look at the config")


# ------------------------------------------------------------------------------------------------------- torch.compile


@pytest.mark.parametrize(
    "message",
    [
        ("torch._inductor.exc.InductorError: AttributeError: 'NoneType' object has no attribute 'meta'",),
        ("InductorError: AttributeError: 'NoneType' object has no attribute 'meta'",),
        ("BackendCompilerFailed: backend='inductor' raised:", "AssertionError: expected size 4==8, stride 1==1"),
        ("torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:", "TypeError: no such operator"),
        ("torch._inductor.exc.InductorError: LoweringException: KeyError: 'layout'",),
    ],
)
def test_a_fault_of_torch_compile_is_no_missing_compiler(message: tuple[str, ...]) -> None:
    hint = hint_for(message)
    assert hint.startswith("torch.compile fails on this code")
    assert "headers" not in hint


@pytest.mark.parametrize(
    "message",
    [
        ("torch._inductor.exc.InductorError: RuntimeError: Failed to find C compiler. Please specify via CC",),
        ("torch._inductor.exc.InductorError: CppCompileError: C++ compile error",),
        ("InductorError: CalledProcessError: Command '['/opt/a/path/that/is/quite/long/and/goes/on/x86_64-gnu-cc']'",),
        (
            "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
            "CalledProcessError: Command '['/opt/a/path/that/is/quite/long/and/goes/on/x86_64-gnu-cc']' returned",
        ),
        ("torch._inductor.exc.InductorError: PermissionError: [Errno 13] Permission denied: '/tmp/torchinductor_a'",),
        ("InductorError: FileNotFoundError: [Errno 2] No such file or directory: 'ldconfig'",),
        (
            "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
            "RuntimeError: Cannot find a working triton installation.",
        ),
        ("RuntimeError: main.c:5:10: fatal error: Python.h: No such file or directory",),
        ("RuntimeError: /usr/bin/ld: cannot find -lcuda: No such file or directory",),
    ],
)
def test_a_compiler_that_is_missing_is_still_one(message: tuple[str, ...]) -> None:
    assert "a compiler with its headers" in hint_for(message)


def test_a_kernel_that_needs_too_much_of_the_gpu_is_no_missing_compiler() -> None:
    for line in (
        (
            "torch._inductor.exc.InductorError: RuntimeError: No valid triton configs. OutOfMemoryError: out of "
            "resource: triton_mm Required: 131072 Hardware limit:101376 Reducing block sizes may help."
        ),
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 66560, Hardware limit: 65536.",
    ):
        assert "smaller blocks" in hint_for((line,))


# -------------------------------------------------------------------------------------------------- files and pickling

NOT_OF_FORMAT = "the file is not of this format"


@pytest.mark.parametrize(
    "line",
    [
        "AttributeError: Can't get local object 'main.<locals>.<lambda>'",
        "AttributeError: Can't pickle local object 'main.<locals>.<lambda>'",
        "_pickle.PicklingError: Can't pickle local object <function main.<locals>.<lambda> at 0x7f>",
    ],
)
def test_what_cannot_be_pickled_has_one_hint(line: str) -> None:
    assert "pass only what can be pickled" in hint_for((line,))


def test_what_the_started_script_does_not_define_is_to_be_in_a_module() -> None:
    """It may be a process that was spawned, or a checkpoint of another script."""
    for name in ("f' on <module '__main__' (built-in)>", "Net' on <module '__main__' from '/home/user/job/train.py'>"):
        hint = hint_for((f"AttributeError: Can't get attribute '{name}",))
        assert "in a module that both import" in hint
    assert hint_for(("AttributeError: Can't get attribute 'f' on <module 'parts' from '/job/parts.py'>",)) == ""


@pytest.mark.parametrize(
    "line",
    [
        "gzip.BadGzipFile: Not a gzipped file (b'<!')",
        "OSError: Unable to open file (file signature not found)",
        "OSError: Unable to synchronously open file (file signature not found)",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "safetensors_rust.SafetensorError: Error while deserializing header: header too large",
        "safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeaderDeserialization",
        "_pickle.UnpicklingError: invalid load key, 'v'.",
        "_pickle.UnpicklingError: invalid load key, '<'.",
        "ValueError: not a parquet file: b'version https://git-lfs.github.com/spec/v1'",
    ],
)
def test_a_file_that_is_something_else_may_be_a_page_or_a_pointer(line: str) -> None:
    hint = hint_for((line,))
    assert hint.startswith(NOT_OF_FORMAT)
    assert "git lfs pull" in hint


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("OSError: Unable to open file (truncated file: eof = 96, sblock->base_addr = 0, stored_eof = 2048)", BROKEN),
        ("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", BROKEN),
        ("_pickle.UnpicklingError: invalid load key, '\\x00'.", NOT_WHOLE),
    ],
)
def test_a_file_that_is_cut_off_has_the_hint_that_it_had(line: str, hint: str) -> None:
    assert hint_for((line,)).startswith(hint)


def test_what_is_no_state_dict_is_to_be_printed() -> None:
    assert "print its type" in hint_for(("TypeError: Expected state_dict to be dict-like, got <class 'Net'>.",))
