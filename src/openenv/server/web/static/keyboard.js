/**
 * Keys for the whole page: Ctrl+Enter does what the tab is for, r resets, digits and arrows press the environment's
 * buttons.
 */

/** What is held with Enter to submit: Command on a Mac. */
export const SUBMIT_KEY = /mac|iphone|ipad/i.test(navigator.platform) ? "⌘" : "Ctrl";

/**
 * @param {object} actions
 * @param {() => void} actions.submit
 * @param {() => void} actions.reset
 * @param {(digit: string) => boolean} actions.press
 * @param {(key: string) => boolean} actions.arrow
 * @returns {() => void} Stops listening.
 */
export function listenToKeys({ submit, reset, press, arrow }) {
  const listen = (/** @type {KeyboardEvent} */ event) => {
    if (event.defaultPrevented || event.isComposing) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      submit();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || isTyping(event.target)) return;
    // On-screen keyboards appear only while the visitor types, so this key is a real one.
    document.documentElement.classList.add("has-keyboard");
    if (event.key === "r") {
      event.preventDefault();
      reset();
    } else if (/^[0-9]$/.test(event.key) && press(event.key)) {
      event.preventDefault();
    } else if (event.key.startsWith("Arrow") && !isMovedByArrows(event.target) && arrow(event.key)) {
      event.preventDefault(); // the environment's buttons have arrows on them, and the page need not scroll
    }
  };
  document.addEventListener("keydown", listen);
  return () => document.removeEventListener("keydown", listen);
}

/** @param {EventTarget | null} target */
function isTyping(target) {
  return target instanceof Element && target.closest("input, textarea, select, [contenteditable]") !== null;
}

/** Whether arrows move something else already: a tab, a list, a slider, a scrolled box. @param {EventTarget | null} target */
function isMovedByArrows(target) {
  return target instanceof Element && target.closest('[role="tablist"], [role="log"], .scroll, pre, iframe') !== null;
}
