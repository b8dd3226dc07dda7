"""In whose name a limit or a budget is set. What an operator set, an account's own admins can't take away."""

from enum import StrEnum


class RuleSetter(StrEnum):
    """Rules of both may stand beside each other for the same thing; the tighter holds."""

    OPERATOR = "operator"
    ACCOUNT = "account"

    @property
    def other(self) -> "RuleSetter":
        return RuleSetter.ACCOUNT if self is RuleSetter.OPERATOR else RuleSetter.OPERATOR

    def may_remove(self, rule_of: "RuleSetter") -> bool:
        return self is RuleSetter.OPERATOR or rule_of is self
