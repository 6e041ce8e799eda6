/**
 * Keys for the whole page: Ctrl+Enter does what the tab is for, r resets, digits press the environment's buttons.
 */

/**
 * @param {object} actions
 * @param {() => void} actions.submit
 * @param {() => void} actions.reset
 * @param {(number: number) => boolean} actions.press
 * @returns {() => void} Stops listening.
 */
export function listenToKeys({ submit, reset, press }) {
  const listen = (/** @type {KeyboardEvent} */ event) => {
    if (event.defaultPrevented || event.isComposing) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      submit();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || isTyping(event.target)) return;
    if (event.key === "r") {
      event.preventDefault();
      reset();
    } else if (/^[1-9]$/.test(event.key) && press(Number(event.key))) {
      event.preventDefault();
    }
  };
  document.addEventListener("keydown", listen);
  return () => document.removeEventListener("keydown", listen);
}

/** @param {EventTarget | null} target */
function isTyping(target) {
  return target instanceof Element && target.closest("input, textarea, select, [contenteditable]") !== null;
}
