"""A headless Chromium that can reach this machine alone, and what it asked for."""

import contextlib
import json
import shutil
import time
from urllib.parse import urlsplit

import pytest


FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--window-size=1000,900", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"),
)
IS_THERE = bool(shutil.which("chromium") and shutil.which("chromedriver"))
needs_browser = pytest.mark.skipif(not IS_THERE, reason="chromium or chromedriver is missing: make browsers")


@contextlib.contextmanager
def chromium():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def hosts(driver) -> set[str]:
    """The hosts of all requests since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    requests = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    addresses = [urlsplit(each["request"]["url"]) for each in requests]
    return {address.hostname for address in addresses if address.scheme not in ("data", "blob")}


def wait_for(condition, seconds=60):
    """The first true value of `condition()`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.05)
    return value
