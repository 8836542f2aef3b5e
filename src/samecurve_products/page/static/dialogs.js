/** Questions before something is lost, and short messages after something was done. */

import { el, fill } from "/page/dom.js";
import { ApiError } from "./api.js";
import { sentence } from "./fields.js";

const shownFor = 6000; // milliseconds

/**
 * Ask before an action. Returns the form's FormData, or null if the user cancels.
 *
 * body: nodes or texts; tone "bad" colours the button of an action that can't be undone.
 */
export function ask({ title, body, action, tone }) {
  const dialog = el("dialog", { "aria-labelledby": "dialog-title" });
  const form = el("form", { method: "dialog" },
    el("h2", { id: "dialog-title" }, title), el("div", { class: "dialog-body" }, body),
    el("div", { class: "dialog-buttons" },
      el("button", { type: "button", class: "plain", onclick: () => dialog.close() }, "Cancel"),
      el("button", { class: tone === "bad" ? "danger" : "primary", value: "yes" }, action)));
  dialog.append(form);
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "yes" ? new FormData(form) : null);
      dialog.remove();
    });
    dialog.showModal();
  });
}

/** Show a message for some seconds; screen readers read it. */
export function tell(words, tone = "good") {
  const toast = el("div", { class: `toast ${tone}` }, el("span", {}, sentence(words)),
    el("button", { type: "button", class: "icon-button", "aria-label": "Close",
      onclick: () => toast.remove() }, "×"));
  document.getElementById("toasts").append(toast);
  setTimeout(() => toast.remove(), tone === "bad" ? 4 * shownFor : shownFor);
}

/** Do what a button asks for; while it runs the button waits; an error is told. */
export async function doing(button, action) {
  const hadFocus = button && document.activeElement === button;
  if (button) button.disabled = true;
  try {
    return await action();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    tell(error.words, "bad");
    return null;
  } finally {
    if (button) button.disabled = false;
    if (hadFocus && document.activeElement === document.body) button.focus();
  }
}

/** Tell screen readers about a change of state. */
export function speak(words) {
  fill(document.getElementById("spoken"), words);
}
