/**
 * The run that is being set up: its base and the texts of the controls that were touched.
 *
 * New run and Data show the same draft; it outlives a reload of the page in this tab.
 */

const place = "samecurve-draft";
const empty = { base: null, values: {}, name: "" };
let kept = null;

/** {base: {kind, id} or null, values: {dotted key: text, or boolean of a switch}, name}. */
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

/** Set what one control shows. It stays set when the text is the base's again: the server knows. */
export function setValue(key, value) {
  changeDraft({ values: { ...draft().values, [key]: value } });
}

/** Keep the values of these keys alone. isKept(key): whether a key stays. */
export function keepValues(isKept) {
  const entries = Object.entries(draft().values).filter(([key]) => isKept(key));
  changeDraft({ values: Object.fromEntries(entries) });
}
