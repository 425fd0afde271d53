"""The errors that a user can cause; each message names the value, the limit and the way out, in one line."""


class UserError(Exception):
    """A request that cannot be served as given; shown to the user as one line, without a traceback."""


class NotEnoughMemory(UserError):
    """A model does not fit where it is asked for."""


class NonFiniteLogits(UserError):
    """A forward pass produced NaN or infinite logits, so no token can be drawn from it."""


class Interrupted(UserError):
    """The user stopped it; what was found so far is kept, and nothing that would follow is begun."""
