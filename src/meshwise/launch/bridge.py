"""Megatron-LM's arguments under other names: Megatron-Bridge's, and those of Megatron's own YAML files.

Both are `section.argument_name`, but for the few names in `catalog/launch.toml`; some of these are inverted
(`add_bias_linear` for `--disable-bias-linear`).
"""

from meshwise.launch.arguments import TORCH_DTYPES, framework_arguments
from meshwise.launch.settings import Settings
from meshwise.launch.tables import launch_tables

_ACTIVATIONS = {"swiglu": "--swiglu", "squaredrelu": "--squared-relu"}


def bridge_settings(settings: Settings) -> tuple[Settings, list[str]]:
    """Settings of Megatron-LM under the names of Megatron-Bridge, and those without a name there."""
    known = framework_arguments("megatron-bridge").arguments
    sections = {name.rpartition(".")[2]: name for name in reversed(known) if not name.startswith("--")}
    found: Settings = {}
    lost = []
    for name, value in settings.items():
        usual = sections.get(name[2:].replace("-", "_"), name)
        there = launch_tables().bridge_names.get(name, usual)
        if not there.startswith("--"):
            found[there.removeprefix("!")] = not value if there.startswith("!") else value
        elif value is not False and name != "--group-query-attention":  # the number of groups says it
            lost.append(f"{name} {value}: Megatron-Bridge has no setting for this")
    return found, lost


def megatron_settings(stated: Settings) -> Settings:
    """Settings `section.name` of Megatron-Bridge, or of a YAML file of Megatron-LM, as Megatron-LM's.

    Names that Megatron-LM does not have are kept.
    """
    known = framework_arguments("megatron-lm").arguments
    exact = {there.removeprefix("!"): name for name, there in launch_tables().bridge_names.items()}
    by_last = {there.rpartition(".")[2]: name for there, name in exact.items()}
    found: Settings = {}
    dtypes: Settings = {f"torch.{there}": here for here, there in TORCH_DTYPES.items()}
    for full, stated_value in stated.items():
        value = dtypes.get(str(stated_value), stated_value)
        place = full if value == stated_value else full.removesuffix("._target_")
        last = place.rpartition(".")[2]
        usual = last if last.startswith("--") else f"--{last.replace('_', '-')}"
        name = exact.get(place) or (usual if usual in known else by_last.get(last, place))
        is_inverted = launch_tables().bridge_names.get(name, "").startswith("!") and name != usual
        if last == "activation_func":
            name, value = _ACTIVATIONS.get(str(value), place), True
        found[name] = not value if is_inverted else value
    if found.get("--num-query-groups"):
        found["--group-query-attention"] = True
    return found
