"""APScheduler on five replicas: a job that one of them runs, or a scheduler that only the leader runs."""

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger

from app import engine, get_engine
from pgfence import Election, Once

scheduler = BackgroundScheduler()


def send_digest() -> int:
    return 3


guarded = Once(get_engine, "digest", cron="0 7 * * *", tz="Europe/Vienna").wrap()(send_digest)
sent: int | None = guarded()
scheduler.add_job(guarded, CronTrigger.from_crontab("0 7 * * *", timezone="Europe/Vienna"))
scheduler.start()


def only_the_leader() -> None:
    scheduler.start(paused=True)
    member = Election(engine, "scheduler").stand(on_gained=scheduler.resume, on_lost=scheduler.pause)
    print(member.is_leader, member.term and member.term.token)
