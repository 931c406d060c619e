"use strict";
// Making elements of the page. Nothing here or in the other scripts reads a text as markup.

// An element with properties and children; a text among the children becomes a text node, whatever is in it.
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function shownNumber(value, digits) {
  return value === null ? "none" : value.toFixed(digits).replace("-", "−");
}
