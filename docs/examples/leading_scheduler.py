"""APScheduler on every replica, where only the leader's scheduler runs jobs."""

from __future__ import annotations

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger
from sqlalchemy import create_engine

from pgfence import Election

engine = create_engine("postgresql+psycopg://")
scheduler = BackgroundScheduler()


def send_digest() -> int:
    return 3


trigger = CronTrigger.from_crontab("0 7 * * *", timezone="Europe/Vienna")
scheduler.add_job(send_digest, trigger)
scheduler.start(paused=True)
member = Election(engine, "scheduler").stand(
    on_gained=scheduler.resume, on_lost=scheduler.pause
)
