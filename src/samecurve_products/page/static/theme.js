// Before the page is drawn: the colours that were chosen last time.
try {
  const chosen = localStorage.getItem("samecurve-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // A browser that keeps nothing follows the system's colours.
}
