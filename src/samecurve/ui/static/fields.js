/** Fields of a form: one control a field, with label, help, unit and its errors beside it. */

import { el, fill, withCode } from "/page/dom.js";

const numberText = /^[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const wholeText = /^[+-]?\d[\d_]*$/;

/**
 * A field of a Form.
 *
 * changed(key, value): called at each change. origin: where the value was set, if anywhere.
 */
export class FormField {
  constructor(field, value, changed, origin) {
    this.field = field;
    this.changed = changed;
    this.id = `field-${field.key.replaceAll(".", "-")}`;
    this.control = this.makeControl(value);
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

  makeControl(value) {
    const { kind, choices, placeholder, nullable, key } = this.field;
    const describedby = `${this.id}-error ${this.id}-help`;
    const common = { id: this.id, "aria-describedby": describedby, name: key };
    if (kind === "switch") {
      const box = el("input", { ...common, type: "checkbox", onchange: () => this.send() });
      box.checked = Boolean(value);
      return box;
    }
    if (kind === "choice") {
      const select = el("select", { ...common, onchange: () => this.send() },
        nullable && el("option", { value: "" }, "none"),
        choices.map((choice) => el("option", { value: choice.value }, choice.label)));
      const text = value === null || value === undefined ? "" : String(value);
      if (text && !choices.some((choice) => choice.value === text)) {
        select.append(el("option", { value: text }, text));
      }
      select.value = text;
      return select;
    }
    const listed = { oninput: () => this.send(), spellcheck: "false", autocomplete: "off" };
    if (kind === "list" || kind === "json") {
      const area = el("textarea", { ...common, ...listed, rows: kind === "list" ? 2 : 3,
        placeholder: placeholder ?? (kind === "list" ? "one a line" : "") });
      area.value = textOf(value);
      return area;
    }
    const isNumber = kind === "number" || kind === "integer";
    const input = el("input", { ...common, ...listed, type: "text",
      inputmode: isNumber ? "decimal" : null,
      placeholder: placeholder ?? (nullable ? "chosen by the plan" : "") });
    input.value = textOf(value);
    return input;
  }

  /** What the control holds: a number where it is one, else the text as it was typed. */
  value() {
    const { kind } = this.field;
    if (kind === "switch") return this.control.checked;
    const text = this.control.value;
    const trimmed = text.trim().replaceAll("_", "");
    if (kind === "integer" && wholeText.test(trimmed)) return Number(trimmed);
    if (kind === "number" && numberText.test(trimmed)) return Number(trimmed);
    return text;
  }

  send() {
    this.showErrors([this.localError()].filter(Boolean));
    this.changed(this.field.key, this.value());
  }

  /** What is wrong with the text before the server is asked; null: nothing. */
  localError() {
    const { kind, nullable } = this.field;
    if (kind !== "integer" && kind !== "number") return null;
    const value = this.value();
    if (typeof value === "number") return null;
    if (value.trim() === "") {
      return nullable ? null : { cause: "A number is needed", remedy: "" };
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

function textOf(value) {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value)) {
    const simple = value.every((item) => typeof item === "string");
    return simple ? value.join("\n") : value.join(", ");
  }
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
