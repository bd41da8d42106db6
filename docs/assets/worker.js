// The search of this site runs in a Worker, which browsers do not start from a file. A hidden frame takes its place there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      const load = (source) =>
        new Promise((loaded, failed) => {
          const script = inside.document.createElement("script");
          script.src = source;
          script.onload = loaded;
          script.onerror = () => failed(new Error(`${source} was not loaded`));
          inside.document.head.append(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      this.ready = load(new URL(url, location));
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
