// Tables and diagrams that scroll are reached by keyboard, and the "copy" buttons of code blocks are not navigation.
"use strict";

const scrolling = ".md-typeset__scrollwrap, .md-typeset p:has(> img[src$='.svg'])";

const correct = () => {
  document.querySelectorAll(scrolling).forEach((each) => { if (each.tabIndex < 0) each.tabIndex = 0; });
  document.querySelectorAll(".md-code__nav:not([role])").forEach((each) => each.setAttribute("role", "presentation"));
};
correct();
new MutationObserver(correct).observe(document.body, { childList: true, subtree: true });
