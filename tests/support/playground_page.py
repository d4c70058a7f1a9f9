"""The playground in a browser, as tests drive it."""

from collections.abc import Callable
from typing import Any

from running import wait_until

PROMPT = "the memory of"
TOKENS = 16
WIDE, NARROW = (1280, 900), (360, 740)


class Page:
    """The playground in a browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, tab: str = "complete") -> None:
        """Opens the page, as a tab that was never used."""
        self.driver.get("about:blank")
        self.driver.get(f"{url}/#{tab}")
        self.until(lambda: self.js("return 'ready' in document.body.dataset"))

    def resize(self, size: tuple[int, int], scheme: str = "light") -> None:
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, css: str) -> list[Any]:
        return self.driver.find_elements("css selector", css)

    def one(self, css: str) -> Any:
        self.until(lambda: self.all(css))
        return self.all(css)[0]

    def click(self, css: str) -> None:
        self.js("arguments[0].scrollIntoView({block: 'center'})", self.one(css))
        self.one(css).click()

    def texts(self, css: str) -> list[str]:
        return self.js("return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)", css)

    def set(self, css: str, value: object) -> None:
        field = self.one(css)
        self.js("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))", field, str(value))

    def button(self, text: str) -> Any:
        """The button with a text, once there is one."""

        def found() -> list[Any]:
            return [each for each in self.all("button") if each.is_displayed() and each.text == text]

        self.until(found)
        return found()[0]

    def until(self, holds: Callable[[], object]) -> None:
        try:
            wait_until(holds)
        except AssertionError as error:
            raise AssertionError(f"the page says {self.texts('.error, .status')}") from error

    def complete(self, prompt: str = PROMPT, tokens: int = TOKENS, *, num_panes: int = 1, **settings: object) -> None:
        """Generates a greedy text with half of the weight on memory, and waits for its end."""
        self.begin(prompt, tokens, **settings)
        self.until_ended(num_panes)

    def begin(self, prompt: str, tokens: int, **settings: object) -> None:
        self.set("#prompt", prompt)
        for name, value in {"temperature": 0, "max-tokens": tokens, "lam": 0.5, **settings}.items():
            self.set(f"#{name}", value)
        self.click("#run")

    def until_ended(self, num_panes: int = 1) -> None:
        self.until(lambda: len(list(filter(None, self.texts(".pane .status")))) == num_panes)
        self.until(lambda: not self.all("[aria-busy]"))

    def assert_quiet(self) -> None:
        """Nothing was refused by the policy, and no script failed."""
        assert [entry for entry in self.driver.get_log("browser") if entry["source"] != "network"] == []
