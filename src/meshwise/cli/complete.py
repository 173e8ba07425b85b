"""What a shell completes beside verbs and options: names of the catalog."""


def models(incomplete: str) -> list[str]:
    """Presets that begin so."""
    from meshwise.model.find import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def clusters(incomplete: str) -> list[str]:
    """Presets that begin so, and chips, behind which their number comes."""
    from meshwise.machine.hardware import chips, cluster_names

    return [
        name for name in (*cluster_names(), *(f"{chip}:" for chip in chips())) if name.startswith(incomplete)
    ]


def machines(incomplete: str) -> list[str]:
    """Clusters, or a chip alone."""
    return [name.removesuffix(":") for name in clusters(incomplete)]
