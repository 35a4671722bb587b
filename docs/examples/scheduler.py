"""A daily job in APScheduler, started on every replica and run by one of them."""

from __future__ import annotations

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger
from sqlalchemy import create_engine

from pgfence import Once

CRON, ZONE = "0 7 * * *", "Europe/Vienna"
TRIES = "*/10 7-8 * * *"

engine = create_engine("postgresql+psycopg://")
scheduler = BackgroundScheduler()


def send_digest() -> int:
    return 3


send_once = Once(engine, "digest", cron=CRON, tz=ZONE).wrap()(send_digest)
scheduler.add_job(send_once, CronTrigger.from_crontab(TRIES, timezone=ZONE))
scheduler.start()
