/**
 * Looks after the loading of the page: sets the colours that were chosen, and loads the page again, a few times, where
 * one of its files did not come.
 *
 * A plain script, so that it runs before the modules and without them.
 */

(() => {
  try {
    const theme = localStorage.getItem("openenv-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // A browser that keeps nothing shows what the system prefers.
  }

  const KEY = "openenv-reloads";
  const MOST = 5;
  const reloads = Number(sessionStorage.getItem(KEY) ?? 0);

  const failed = (/** @type {Event} */ event) => {
    if (!(event.target instanceof HTMLScriptElement || event.target instanceof HTMLLinkElement)) return;
    removeEventListener("error", failed, true);
    const line = document.querySelector(".loading");
    if (reloads >= MOST) {
      sessionStorage.removeItem(KEY);
      if (line) line.textContent = "The page could not be loaded. Reload it to try again.";
      return;
    }
    sessionStorage.setItem(KEY, String(reloads + 1));
    if (line) line.textContent = "The page could not be loaded, trying again…";
    setTimeout(() => location.reload(), 250 * 2 ** reloads);
  };

  addEventListener("error", failed, true); // errors of elements do not bubble
  addEventListener("load", () => removeEventListener("error", failed, true));
})();
