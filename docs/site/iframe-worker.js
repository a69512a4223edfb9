// Search in pages that are opened from a file, which may not start a web worker: an iframe runs the worker's script.
// The theme looks for the name IFrameWorker.
"use strict";

if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      this.loaded = this.load(url);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        script.onload = resolve;
        script.onerror = reject;
        script.src = url;
        this.inside.document.head.append(script);
      });
    }

    // Like a worker: in order, and each message only once the microtasks of the one before it have run.
    postMessage(data) {
      const send = (resolve) => setTimeout(() => {
        this.inside.dispatchEvent(new MessageEvent("message", { data }));
        resolve();
      });
      this.loaded = this.loaded.then(() => new Promise(send));
    }
  };
  window.Worker = window.IFrameWorker;
}
