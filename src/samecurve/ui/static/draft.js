/**
 * The run that is being set up: its base and the values that were changed.
 *
 * New run and Data show the same draft; it outlives a reload of the page in this tab.
 */

const place = "samecurve-draft";
const empty = { base: null, values: {}, name: "" };
let kept = null;

/** {base: {kind, id} or null, values: {dotted key: value}, name}. */
export function draft() {
  if (kept) return kept;
  try {
    kept = { ...empty, ...JSON.parse(sessionStorage.getItem(place) ?? "{}") };
  } catch {
    kept = { ...empty };
  }
  return kept;
}

/** Change parts of the draft. */
export function changeDraft(changes) {
  kept = { ...draft(), ...changes };
  try {
    sessionStorage.setItem(place, JSON.stringify(kept));
  } catch {
    // The draft lasts as long as the page.
  }
}

/** Set one value; a value equal to the base's own is no change. */
export function setValue(key, value, original) {
  const values = { ...draft().values };
  if (JSON.stringify(value) === JSON.stringify(original)) delete values[key];
  else values[key] = value;
  changeDraft({ values });
}
