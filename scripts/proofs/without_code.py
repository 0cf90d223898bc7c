"""Real training commands, unchanged, with and without `thinwire attach`: two processes on a CPU.

Each command runs three times: as it is, under `thinwire attach --bits 4` (in SLURM and in pods, by a variable
of the environment), and with an `attach` in its code, or the plugin in its file.
The last two must have the same losses, to the last digit, and not those of the first. A command whose package
or file is missing is skipped, and the line says why. Arguments choose: `without_code.py nanogpt trl`.

The official run_clm.py comes with no package: set RUN_CLM=…/examples/pytorch/language-modeling/run_clm.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PYTHON, HERE = sys.executable, Path(__file__).resolve().parent
ATTACH = [PYTHON, "-m", "thinwire", "attach", "--bits", "4", "--strict", "--"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
ACCELERATE = [
    PYTHON,
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes=2",
    "--num_machines=1",
]
ACCELERATE += ["--mixed_precision=no", "--dynamo_backend=no"]
# A job's script sets these variables; it needs a running slurmctld and slurmd.
RANKS = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"
SRUN = ["srun", "--ntasks=2", "bash", "-c", f'{RANKS} MASTER_ADDR=127.0.0.1 MASTER_PORT=29577 exec "$@"', "-"]
# A PyTorchJob sets these variables in a pod: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and nothing else.
PODS = [PYTHON, "-m", "thinwire", "lab", "--machines", "2", "--", "env"]
PODS += ["--unset=LOCAL_RANK", "--unset=LOCAL_WORLD_SIZE", "--unset=GROUP_RANK", "--unset=GROUP_WORLD_SIZE"]
BY_VARIABLE = ["env", "THINWIRE_ATTACH=4 bits"]
TIMEOUT_SECONDS = 900
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "FORCE_TORCHRUN": "1",  # LLaMA-Factory's
    "NPROC_PER_NODE": "2",
    "RAY_raylet_start_wait_time_s": "600",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", str(HERE))]),  # for seeded.py
}
OF_TRAINER: dict[str, Any] = {
    "max_steps": 6,
    "logging_steps": 1,
    "learning_rate": 0.01,
    "save_steps": 6,
    "report_to": "none",
    "use_cpu": True,
}
ROWS_OF_FACTORY = {"rows": {"file_name": "rows/train.jsonl", "columns": {"prompt": "text"}}}


@dataclass(frozen=True)
class Proof:
    """A training command, the same with an `attach` in its code, and the packages of both."""

    packages: Sequence[str]
    command: list[str]
    in_code: list[str]
    attach: Sequence[str] = (*ATTACH,)  # before the command


def proofs(folder: Path) -> dict[str, Proof]:
    """Return every proof by name; what they read and write is in a folder."""

    def own(name: str, launch: list[str], *packages: str) -> Proof:
        command = [*launch, str(HERE / "loops.py"), name]
        return Proof(packages, command, [*command, "in-code"])

    def foreign(packages: Sequence[str], launch: list[str], script: str, arguments: list[str]) -> Proof:
        with_callback = str(HERE / "with_callback.py")
        return Proof(packages, [*launch, script, *arguments], [*launch, with_callback, script, *arguments])

    model, trained = str(folder / "model"), {"model_name_or_path": str(folder / "model")} | OF_TRAINER
    clm: dict[str, Any] = {
        "config_name": model,
        "tokenizer_name": model,
        "train_file": str(folder / "train.txt"),
    }
    clm |= {"do_train": True, "block_size": 32, "output_dir": "out"} | OF_TRAINER
    lora: dict[str, Any] = {
        "dataset_name": str(folder / "rows"),
        "max_length": 32,
        "use_peft": True,
        "lora_r": 4,
    }
    lora |= {"lora_target_modules": "all-linear", "bf16": False, "output_dir": "out"}
    factory: dict[str, Any] = {
        "stage": "pt",
        "finetuning_type": "full",
        "dataset": "rows",
        "dataset_dir": str(folder),
    }
    factory |= {"do_train": True, "cutoff_len": 32, "template": "empty", "output_dir": "out"}
    (folder / "train.yaml").write_text(json.dumps(trained | factory))  # JSON is YAML
    (folder / "dataset_info.json").write_text(json.dumps(ROWS_OF_FACTORY))
    cli = foreign(
        ("llamafactory", "trl", "datasets"),
        TORCHRUN,
        source("llamafactory.launcher"),
        [str(folder / "train.yaml")],
    )
    axolotl: dict[str, Any] = {
        "base_model": model,
        "reinit_weights": True,  # on a CPU axolotl loads none
        "datasets": [{"path": str(folder / "rows/train.jsonl"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "dataset_num_proc": 1,
        "seed": 0,  # fixes the order of the rows
        "sequence_len": 32,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "output_dir": "out",
        "plugins": ["seeded.SeededPlugin"],
    }
    axolotl |= {
        name: OF_TRAINER[name] for name in ("max_steps", "logging_steps", "learning_rate", "save_steps")
    }
    (folder / "axolotl.yaml").write_text(json.dumps(axolotl))
    axolotl["plugins"].append("thinwire.integrations.axolotl.ThinwirePlugin")
    (folder / "plugin.yaml").write_text(json.dumps(axolotl | {"thinwire_bits": 4}))
    axolotl_cli = str(Path(PYTHON).with_name("axolotl"))
    by_axolotl = [
        [axolotl_cli, "train", str(folder / name), "--launcher", "torchrun", "--", *TORCHRUN[3:]]
        for name in ("axolotl.yaml", "plugin.yaml")
    ]
    return {
        "nanogpt": own("nanogpt", TORCHRUN),
        "slurm": replace(own("nanogpt", [*SRUN, PYTHON]), attach=BY_VARIABLE),
        "pods": replace(own("nanogpt", [*PODS, PYTHON]), attach=BY_VARIABLE),
        "accelerate": own("accelerated", ACCELERATE, "accelerate"),
        "lightning": own("lightning", [PYTHON], "lightning"),
        "transformers": own("transformers", TORCHRUN, "transformers", "accelerate"),
        "ray": own("ray_train", [PYTHON], "ray"),
        "run_clm": foreign(
            ("datasets", "evaluate"), TORCHRUN, os.environ.get("RUN_CLM", "run_clm.py"), options(clm)
        ),
        # TRL 1.9 draws an adapter before it sets a seed, so that its runs differ; 1.16 does it after.
        "trl": foreign(
            ("trl", "peft", "datasets"), ACCELERATE, source("trl.scripts.sft"), options(trained | lora)
        ),
        "llamafactory": replace(
            cli, command=[PYTHON, "-m", "llamafactory.cli", "train", str(folder / "train.yaml")]
        ),
        "axolotl": Proof(("axolotl",), *by_axolotl),
    }


def options(values: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def source(module: str) -> str:
    """Return a module's file; its name alone if it is not installed."""
    package = module.partition(".")[0]
    folder = find_spec(package)
    if folder is None or folder.origin is None:
        return module
    return str(Path(folder.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py"))


def make_inputs(folder: Path) -> None:
    """Write a small random GPT-2, and the texts that it is trained on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = [f"w{number}" for number in range(90)]
    vocabulary = {word: index for index, word in enumerate(["<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>").save_pretrained(
        folder / "model"
    )
    sizes: dict[str, Any]
    sizes = {"vocab_size": len(vocabulary), "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    texts = [" ".join(words[(row + 3 * i) % 90] for i in range(30)) for row in range(200)]
    (folder / "train.txt").write_text("\n".join(texts))
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def main() -> None:
    chosen, failed = sys.argv[1:], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if find_spec("transformers") is not None:
            make_inputs(folder)
        for proof_name, proof in proofs(folder).items():
            if chosen and proof_name not in chosen:
                continue
            missing = [package for package in proof.packages if find_spec(package) is None]
            missing += [tool for tool in proof.command[:1] if shutil.which(tool) is None]
            missing += [part for part in proof.command if part.endswith(".py") and not Path(part).exists()]
            began = time.monotonic()
            try:
                told = f"skipped: no {', '.join(missing)}" if missing else proved(proof, folder)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failed.append(proof_name)
                told = f"FAILED: {error}"
            print(f"{proof_name:13} {time.monotonic() - began:4.0f} s  {told}", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def proved(proof: Proof, folder: Path) -> str:
    """Run a proof three times; return what was sent."""
    plain, _ = run(proof.command, folder)
    attached, told = run([*proof.attach, *proof.command], folder)
    in_code, _ = run(proof.in_code, folder)
    assert attached == in_code, f"attached, losses are {attached}; with an attach in the code {in_code}"
    assert attached != plain, f"nothing was compressed: {told[-2000:]}"
    sent = re.findall(r"steps sent (\S+) MB, where bf16 would have sent (\S+);", told)
    if "ray_train" in proof.command:
        sent = sent or [("?", "?")]  # Ray may kill its workers before it has shown their last line
    assert sent, f"what was sent is not told: {told[-2000:]}"
    return (
        f"{len(attached)} equal losses; sent {sent[0][0]} MB, in bf16 {sent[0][1]}; unattached, they differ"
    )


def run(command: list[str], folder: Path) -> tuple[list[float], str]:
    """Run a command; return the losses that it prints, or its Trainer saves, and all that it prints."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env=os.environ
        | ENVIRONMENT
        | {"HOME": str(folder), "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    told = ended.stdout + ended.stderr
    assert ended.returncode == 0, f"{' '.join(command)}: {told[-3000:]}"
    printed = re.findall(r"losses (\[.*\])", told)
    if printed:
        return json.loads(printed[0]), told
    (state,) = folder.glob("out/checkpoint-*/trainer_state.json")
    history = json.loads(state.read_text())["log_history"]
    shutil.rmtree(folder / "out")  # the next run would resume from there
    return [log["loss"] for log in history if "loss" in log], told


if __name__ == "__main__":
    main()
