"""Errors that end a command, each with its exit code; only the mains catch them."""

EXIT_OK = 0
EXIT_JOB_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INFEASIBLE = 3


class BagualuError(Exception):
    """Base of the errors below: the text is one line for the user."""

    exit_code = EXIT_JOB_FAILED


class JobFailed(BagualuError):
    """The job itself failed: out of memory, a dead rank."""


class InvalidInput(BagualuError):
    """Bad input; the text has the form of the C++ exception of the same name."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, where: object, field: str, found: object, allowed: str) -> None:
        self.where, self.field = str(where), field
        self.found, self.allowed = str(found), allowed
        super().__init__(f"{self.where}: {field}: found {self.found}; allowed {allowed}")


class Infeasible(BagualuError):
    """The budget is under the floor by missing_bytes."""

    exit_code = EXIT_INFEASIBLE

    def __init__(self, text: str, missing_bytes: int) -> None:
        self.missing_bytes = missing_bytes
        super().__init__(text)
