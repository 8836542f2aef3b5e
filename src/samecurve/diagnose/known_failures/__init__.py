"""Known failures: what is printed, what it means, what to do.

The first entry that matches an error's text is it, so the more specific stand first.

A `symptom`: a rank that says so may only have lost another one, or waited for it in vain; it is the
cause where no rank failed for a reason of its own.
"""

from samecurve.diagnose.known_failures.devices import DEVICES
from samecurve.diagnose.known_failures.entry import Diagnosis
from samecurve.diagnose.known_failures.memory import MEMORY
from samecurve.diagnose.known_failures.rendezvous import RENDEZVOUS
from samecurve.diagnose.known_failures.user_code import COMPILING, USER_CODE

KNOWN_FAILURES = (*COMPILING, *DEVICES, *MEMORY, *USER_CODE, *RENDEZVOUS)


def diagnose(text: str) -> Diagnosis | None:
    """The known failure that an error's text is; None: no entry matches."""
    for known in KNOWN_FAILURES:
        for pattern in known.patterns:
            if match := pattern.search(text):
                return known.explain(match)
    return None
