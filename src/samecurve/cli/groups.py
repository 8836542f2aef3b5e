"""A command that has verbs: its help lists them with whole sentences."""

import click

from samecurve.cli.options import HelpContext

_WHOLE = 1 << 10  # characters of a summary: none is cut


class VerbGroup(click.Group):
    """The verbs of a command; the command alone shows its help."""

    context_class = HelpContext

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            args = ["--help"]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each verb with its first sentence, on as many lines as the sentence needs."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, verb.get_short_help_str(_WHOLE))
                    for name, verb in verbs
                    if verb is not None and not verb.hidden
                ]
            )
