"""What a script can see of how it was started; must be the same as with plain Python.

And a spawned process finds its function.
"""

import multiprocessing
import pickle
import sys


class Thing:
    pass


def double(x: int) -> int:
    return 2 * x


if __name__ == "__main__":
    main = sys.modules["__main__"]
    shown = {
        name: value if isinstance(value, (str, type(None), dict)) else type(value).__name__
        for name, value in vars(main).items()
        if name.startswith("__")
    }
    print(
        sorted(shown.items(), key=lambda item: item[0]),
        sys.argv,
        sys.path[:2],
        main.__spec__.name if main.__spec__ else None,
        pickle.dumps(Thing()),
    )
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [21]))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.map(double, [21]))
