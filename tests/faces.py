"""The rule that a package is imported by its face, as a contract for import-linter."""

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output


class FacesContract(Contract):
    """Whoever is outside a package imports its ``__init__.py``, and no module inside it."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        own = {name for name in graph.modules if not graph.is_module_squashed(name)}
        packages = {name for name in own if "." in name and graph.find_children(name)}
        past = [
            (importer, inner, package)
            for package in packages
            for inner in graph.find_descendants(package)
            for importer in graph.find_modules_that_directly_import(inner)
            if importer != package and not importer.startswith(f"{package}.")
        ]
        return ContractCheck(kept=not past, metadata={"past": sorted(past)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, inner, package in check.metadata["past"]:
            output.print_error(f"{importer} imports {inner}: import it from {package}.")
