/** Fields of a form: one control a field, with label, help, unit and its errors beside it. */

import { el, fill, withCode } from "/page/dom.js";

const numberText = /^[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

/**
 * A field of a Form.
 *
 * value: what the control shows: a text, or a boolean of a switch. changed(key, value): called at
 * each change with what the control then shows. origin: where the value was set, if anywhere.
 */
export class FormField {
  constructor(field, value, changed, origin) {
    this.field = field;
    this.changed = changed;
    this.id = `field-${field.key.replaceAll(".", "-")}`;
    this.control = this.makeControl(kindOfControl(field, value));
    this.show(value);
    this.problem = el("p", { class: "field-error", id: `${this.id}-error`, hidden: true });
    const isSwitch = field.kind === "switch";
    const label = el("label", { for: this.id, title: origin && `set in ${origin}` }, field.label);
    const help = field.help && el("p", { class: "quiet", id: `${this.id}-help` },
      withCode(this.begins(field.help)));
    this.element = el("div", { class: `field ${field.kind}`, "data-key": field.key },
      isSwitch ? el("div", { class: "switch-row" }, this.control, label) : [label,
        el("div", { class: "control-row" }, this.control,
          field.unit && el("span", { class: "unit quiet" }, field.unit))],
      this.problem, help);
  }

  /** The help text as a sentence; a value that it begins with keeps its spelling. */
  begins(help) {
    const [word] = help.split(/[\s,;:]/);
    return this.field.choices?.some(({ value }) => value === word) ? help : sentence(help);
  }

  makeControl(kind) {
    const { choices, placeholder, nullable, key } = this.field;
    const describedby = `${this.id}-error ${this.id}-help`;
    const common = { id: this.id, "aria-describedby": describedby, name: key };
    if (kind === "switch") {
      return el("input", { ...common, type: "checkbox", onchange: () => this.send() });
    }
    if (kind === "choice") {
      return el("select", { ...common, onchange: () => this.send() },
        nullable && el("option", { value: "" }, "none"),
        choices.map((choice) => el("option", { value: choice.value }, choice.label)));
    }
    const listed = { oninput: () => this.send(), spellcheck: "false", autocomplete: "off" };
    if (kind === "list" || kind === "json" || kind === "lines") {
      return el("textarea", { ...common, ...listed, rows: kind === "list" ? 2 : 3,
        placeholder: placeholder ?? (kind === "list" ? "one a line" : "") });
    }
    const isNumber = kind === "number" || kind === "integer";
    return el("input", { ...common, ...listed, type: "text",
      inputmode: isNumber ? "decimal" : null,
      placeholder: placeholder ?? (nullable ? "chosen by the plan" : "") });
  }

  /** Show a value in the control; a choice that the list lacks joins the list. */
  show(value) {
    const { control } = this;
    if (this.field.kind === "switch") control.checked = value;
    else if (this.value() !== value) {
      if (control.options && ![...control.options].some((option) => option.value === value)) {
        control.append(el("option", { value }, value));
      }
      control.value = value;
    }
  }

  /** What the control shows: a text, or a boolean of a switch. */
  value() {
    return this.field.kind === "switch" ? this.control.checked : this.control.value;
  }

  send() {
    this.showErrors([this.localError()].filter(Boolean));
    this.changed(this.field.key, this.value());
  }

  /** What is wrong with the text before the server is asked; null: nothing. */
  localError() {
    const { kind, nullable } = this.field;
    if (kind !== "integer" && kind !== "number") return null;
    const text = this.value().trim();
    if (!text) return nullable ? null : { cause: "A number is needed", remedy: "" };
    const isNumber = numberText.test(text);
    if (isNumber && (kind === "number" || Number.isInteger(Number(text.replaceAll("_", ""))))) {
      return null;
    }
    const cause = kind === "integer" ? "A whole number is needed, such as 64"
      : "A number is needed, such as 0.1 or 3e-4";
    return { cause, remedy: "" };
  }

  showErrors(errors) {
    this.problem.hidden = !errors.length;
    if (errors.length) this.control.setAttribute("aria-invalid", "true");
    else this.control.removeAttribute("aria-invalid");
    fill(this.problem, errors.map(({ cause, remedy }) => el("span", {},
      this.withoutKey(cause), remedy && `: ${remedy}`)));
  }

  withoutKey(cause) {
    const words = cause.startsWith(`${this.field.key}: `)
      ? cause.slice(this.field.key.length + 2) : cause;
    return sentence(words);
  }
}

/** Fields under a title. */
export function fieldGroup({ title, text }, fields) {
  return el("fieldset", { class: "group" }, el("legend", {}, title),
    text && el("p", { class: "quiet group-text" }, text),
    el("div", { class: "fields" }, fields.map(({ element }) => element)));
}

/** "what is trained" -> "What is trained". A key, such as batch.samples, stays as it is. */
export function sentence(words) {
  return /^[a-z][a-z]*[ ;,]/.test(words) ? words[0].toUpperCase() + words.slice(1) : words;
}

/** The field's kind; "lines": a text of several lines, which an input would join. */
function kindOfControl({ kind }, value) {
  return kind === "text" && value.includes("\n") ? "lines" : kind;
}
