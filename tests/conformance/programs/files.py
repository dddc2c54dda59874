"""Files that several replicas write and read."""

from __future__ import annotations

import os
import shutil

import torch

import distnb
from tests.conformance.prelude import strategy
from tests.conformance.program import program


@program(expected=lambda n: {"names": [[float(replica) for replica in range(n)]] * 2})
def one_folder_for_all():
    folder = distnb.shared_folder("distnb-conformance-")

    def write(step):
        with open(os.path.join(folder, f"{step}-{distnb.replica_id()}"), "w"):
            return torch.ones(())

    strategy.reduce("sum", strategy.run(write, args=(0,)), axis=None)  # from here on every replica has written
    strategy.reduce("sum", strategy.run(write, args=(1,)), axis=None)
    found = sorted(os.listdir(folder))
    names = [[float(name[2:]) for name in found if name[0] == step] for step in "01"]
    strategy.reduce("sum", strategy.run(lambda: torch.ones(())), axis=None)  # every replica has read
    distnb.on_chief(shutil.rmtree)(folder)
    return {"names": names}


@program(under=("one_device", "sharded"), expected=lambda n: {"largest_difference": 0.0})
def pretrained_model():
    import transformers
    from safetensors.torch import load_file

    strategy.run(lambda: transformers.utils.logging.disable_progress_bar())
    folder = distnb.shared_folder("distnb-conformance-")
    sizes = {
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 20,
        "n_positions": 16,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    with strategy.scope():
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))  # its head is tied
    model.save_pretrained(folder)
    strategy.reduce("sum", strategy.run(lambda: torch.ones(())), axis=None)  # every replica has returned
    saved = load_file(os.path.join(folder, "model.safetensors"))
    state = {name: getattr(each, "full_tensor", each.detach)() for name, each in model.named_parameters()}
    largest = max(float((each.detach() - saved[name]).abs().max()) for name, each in state.items())
    strategy.reduce("sum", strategy.run(lambda: torch.ones(())), axis=None)  # every replica has read
    distnb.on_chief(shutil.rmtree)(folder)
    return {"largest_difference": largest}
