/** Elements made from data. Texts become text nodes, never markup. */

/**
 * Make an element.
 * attributes: `onclick` and the like take functions; `style` takes an object of properties;
 * true sets an empty attribute; false, null and undefined leave it out.
 * children: nodes, texts, numbers, lists of them; null and false are left out.
 */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Make an SVG element; see `el`. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** Replace all that an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...nodes(children));
  return element;
}

/** The parts of a text, in which commands between backticks become code. */
export function withCode(words) {
  const parts = words.split("`");
  if (parts.length % 2 === 0) return [words];
  return parts.map((part, index) => (index % 2 ? el("code", {}, part) : part));
}

/** A colour of the style sheet ("s0", "bad", ...) as the browser computes it now. */
export function themeColour(name) {
  let probe = document.getElementById("colour-probe");
  if (!probe) {
    probe = el("span", { id: "colour-probe", hidden: true });
    document.body.append(probe);
  }
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

/** The style variable of a block's colour: an index of the series, or a tone. */
export function colourName(colour) {
  return typeof colour === "number" ? `s${colour % 8}` : colour;
}

/** Call `changed` whenever light changes to dark or back. */
export function onThemeChange(changed) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  const watched = { attributes: true, attributeFilter: ["data-theme"] };
  new MutationObserver(changed).observe(document.documentElement, watched);
}

/** A button that switches light and dark. `remember(theme)` is told the choice. */
export function themeSwitch(remember = () => {}) {
  const root = document.documentElement;
  const isDark = () => {
    if (root.dataset.theme) return root.dataset.theme === "dark";
    return matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const button = el("button", { class: "icon-button", type: "button" }, themeIcon());
  const describe = () => {
    const label = isDark() ? "Switch to light colours" : "Switch to dark colours";
    button.setAttribute("aria-label", label);
    button.title = label;
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
  });
  onThemeChange(describe);
  describe();
  return button;
}

function themeIcon() {
  const options = { viewBox: "0 0 20 20", width: 18, height: 18, "aria-hidden": "true" };
  return svg("svg", options,
    svg("circle", { cx: 10, cy: 10, r: 7, fill: "none", stroke: "currentColor",
      "stroke-width": 1.6 }),
    svg("path", { d: "M10 3a7 7 0 0 1 0 14z", fill: "currentColor" }));
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") setStyles(element, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...nodes(children));
  return element;
}

function setStyles(element, styles) {
  for (const [name, value] of Object.entries(styles)) element.style.setProperty(name, value);
}

function nodes(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined
    && child !== false && child !== "");
}
