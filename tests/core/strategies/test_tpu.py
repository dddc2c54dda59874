"""TPUStrategy without a TPU, and its use of the chips that torch_tpu reports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import distnb
from distnb import accelerators
from distnb.cluster import devices, tpu_chips
from distnb.cluster.devices import plan_devices
from distnb.errors import OptionError, StartError
from distnb.magics.cell_request import read_request
from distnb.notebook.teams import choose_engines
from distnb.options import StrategySpec
from distnb.topology import Device

CHIPS = [Device("tpu", index) for index in range(4)]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    tpu_chips._query_all.cache_clear()
    yield
    tpu_chips._query_all.cache_clear()


@pytest.fixture
def four_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ",".join(f"localhost:{port}" for port in range(4))
    monkeypatch.setattr(tpu_chips, "_query_all", lambda: ({"TORCH_TPU_SLICEBUILDER_ADDRESSES": addresses}, ""))


def test_without_torch_tpu_the_error_names_the_package_and_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cure = r"torch_tpu is not installed .*pip install 'distnb\[tpu\]'.* Cloud TPU VM"
    with pytest.raises(StartError, match=r"TPUStrategy: there is no TPU here\. .*" + cure):
        distnb.TPUStrategy()
    with pytest.raises(StartError, match=r"%%distribute tpu: there is no TPU here\. .*" + cure):
        read_request("tpu", {})
    with pytest.raises(StartError, match=r"There is no tpu:0 on this machine\. .*" + cure):
        plan_devices(devices="tpu")


def test_torch_tpu_without_a_chip_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(count: int) -> dict[str, str]:
        raise StartError("torch_tpu cannot use a TPU chip of this machine: ValueError: got none.")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(tpu_chips, "_query", ask)
    assert tpu_chips.chips() == 0
    with pytest.raises(StartError, match=r"ValueError: got none\. .*Cloud TPU VM"):
        distnb.TPUStrategy()


def test_chips_of_several_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(
        tpu_chips, "_query", lambda count: {"TORCH_TPU_SLICEBUILDER_ADDRESSES": "10.0.0.1:8070,10.0.0.2:8070"}
    )
    with pytest.raises(StartError, match="slice of several machines"):
        distnb.TPUStrategy()


@pytest.mark.usefixtures("four_chips")
def test_a_bare_type_means_all_chips_or_the_first_n() -> None:
    assert plan_devices(devices="tpu") == tuple(CHIPS)
    assert plan_devices(2, "tpu") == tuple(CHIPS[:2])
    with pytest.raises(StartError, match=r"There is no tpu:4 .* It has tpu:0, tpu:1, tpu:2, tpu:3 and the CPU"):
        plan_devices(5, "tpu")
    with pytest.raises(OptionError, match="from tpu:0 on"):
        plan_devices(devices="tpu:1")
    with pytest.raises(OptionError, match="from tpu:0 on"):
        plan_devices(2, "tpu:0", oversubscribe=True)


@pytest.mark.usefixtures("four_chips")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tpu_cluster_resolver": distnb.cluster_resolver.TFConfigClusterResolver()}, "tpu_cluster_resolver=.*Leave"),
        ({"experimental_device_assignment": object()}, "experimental_device_assignment=.*replica r has the chip"),
        ({"experimental_spmd_xla_partitioning": True}, "partitioning=True cannot be honoured"),
        ({"devices": "cpu:0"}, "name TPU chips"),
        ({"devices": []}, "devices is empty"),
        ({"devices": 2}, "devices=2: name the devices"),
        ({"devices": "tpu:1,tpu:0"}, "from tpu:0 on"),
        ({"gradient_reduction": "max"}, "write 'sum' or 'mean'"),
    ],
)
def test_an_argument_is_applied_or_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        distnb.TPUStrategy(**arguments)  # type: ignore[arg-type]


@pytest.mark.usefixtures("four_chips")
def test_the_name_and_the_class_make_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distnb.runtime.this_process.this_process.remote", None)
    request = read_request("tpu --devices tpu:0,tpu:1 --gradients mean", {})
    assert distnb.TPUStrategy(devices=["tpu:0", "/device:TPU:1"], gradient_reduction="mean").spec == request.spec
    with pytest.raises(OptionError, match="cpu:0 is no tpu device"):
        read_request("tpu --devices cpu:0", {})
    with pytest.raises(OptionError, match="--oversubscribe"):
        read_request("tpu --oversubscribe", {})


def test_a_tpu_strategy_uses_engines_on_chips() -> None:
    spec = StrategySpec(kind="tpu")
    assert choose_engines(spec, {0: Device("cpu"), 1: CHIPS[0], 2: CHIPS[1]}) == [1, 2]
    with pytest.raises(OptionError, match=r"needs engines on tpu devices.* have cpu:0\. .*%distnb start --devices tpu"):
        choose_engines(spec, {0: Device("cpu")})


def test_each_process_gets_its_chip() -> None:
    launch = {"TORCH_TPU_TOPOLOGY": "2,1,1"}
    environment = tpu_chips.chip_environment(CHIPS[1], CHIPS[:2], launch)
    assert environment == launch | {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert tpu_chips.chip_environment(Device("cpu"), [Device("cpu")], {}) == {}
    assert tpu_chips.launch_environment([Device("cpu")]) == {}


def test_a_type_that_torch_does_not_know_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerators.count("hpu") == 0
    assert accelerators.c10d_backend("cpu") is None
    assert accelerators.generator(Device("cpu")) is None
    assert accelerators.torch_device(Device("cpu", 1)) == torch.device("cpu")
    assert accelerators.torch_device(Device("xpu", 1)) == torch.device("xpu", 1)
    with pytest.raises(OptionError, match="knows no device type 'npu'"):
        accelerators.use(Device("npu"))
    with pytest.raises(OptionError, match=r"There is no device xpu:0 here\. The devices are cpu:0\."):
        accelerators.check_available(Device("xpu"))
    monkeypatch.setattr(devices, "available_gpus", lambda: 0)
    with pytest.raises(StartError, match=r"There is no xpu:0 on this machine\. It has the CPU only"):
        plan_devices(devices="xpu")
