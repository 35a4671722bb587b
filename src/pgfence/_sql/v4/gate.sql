-- The fence, since version 4: writers with one token no longer lock the gate's row together, because PostgreSQL writes a
-- multixact for each transaction that joins. These functions replace those of version 1, and the callers see no difference.
--
-- A transaction is inside a gate in one of two ways:
--
-- 1. READ COMMITTED: it holds the gate's advisory lock, shared, and has read its own token in the gate's row afterwards, in a
--    statement whose snapshot is newer than the lock.
-- 2. It holds the row FOR SHARE, as in version 1: in REPEATABLE READ and SERIALIZABLE, where every read may be older than the
--    lock; while a newer holder has the advisory lock; if it entered before these functions were installed; and for all but the
--    first gate of each setting that stores its claims, so that a transaction takes at most 256 places in the lock table.
--
-- A newer holder has to wait for both kinds. A transaction that updates or deletes the row locks it first, and then the trigger
-- below takes the advisory lock exclusively. The trigger is on the table, so this applies to every version of every function.
--
-- Writers only try the advisory lock and never wait for it, and they try it only for a gate that has their own token. So no
-- session waits for the row while it holds the advisory lock, and the order "row, then advisory lock" cannot deadlock.
--
-- The key is hashtextextended(resource, oid of the table of gates). If another program uses the same number, this costs time, but
-- no stale writer is admitted.

CREATE FUNCTION @lock_gate_v1@() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        PERFORM pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended(OLD.resource, TG_RELID::bigint));
        RETURN OLD;
    END IF;
    IF NEW.token <> OLD.token OR NEW.resource <> OLD.resource THEN
        PERFORM pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended(OLD.resource, TG_RELID::bigint));
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION @enter_gate_v1@(p_resource text, p_token bigint, p_wait double precision DEFAULT 30) RETURNS void
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    place oid := '@gate_text@'::pg_catalog.regclass;
    newest bigint;
    issued bigint;
    claim text;
    own text;
    entered boolean;
    mark text := pg_catalog.md5(place::text || ' ' || p_resource);
    setting text := 'pgfence.f' || pg_catalog.left(mark, 2);
    claims text := pg_catalog.current_setting(setting, true);
    claimed text := pg_catalog.split_part(claims, mark || ' ', 2);  -- and all older claims
BEGIN
    IF p_token IS NULL OR p_token < 1 THEN
        RAISE EXCEPTION 'a fencing token must be 1 or more, not %', p_token USING ERRCODE = '22023';
    END IF;
    -- The first look takes no lock, because a transaction that is about to raise the gate must not hold the lock.
    SELECT t.token INTO newest FROM @gate@ AS t WHERE t.resource = p_resource;
    IF newest = p_token AND pg_catalog.current_setting('transaction_isolation') = 'read committed'
        -- A read-only server or transaction must be rejected, as FOR SHARE does below.
        AND pg_catalog.current_setting('transaction_read_only') = 'off'
        AND (COALESCE(claims, '') = '' OR claimed = p_token || ',') THEN
        IF pg_catalog.pg_try_advisory_xact_lock_shared(pg_catalog.hashtextextended(p_resource, place::bigint)) THEN
            -- Read again, because a newer holder may have entered and committed before the lock was granted.
            SELECT t.token, l.token INTO newest, issued
            FROM @gate@ AS t LEFT JOIN @lease@ AS l ON l.name = t.resource WHERE t.resource = p_resource;
            entered := newest = p_token;
        END IF;
    END IF;
    IF entered IS NOT TRUE THEN
        -- The condition on the token is part of the locking query, so that writers with the same token run concurrently, and
        -- three new holders that raise the gate at the same time do not deadlock.
        PERFORM 1 FROM @gate@ AS t WHERE t.resource = p_resource AND t.token = p_token FOR SHARE;
        IF NOT FOUND THEN
            SELECT l.token INTO newest FROM @lease@ AS l WHERE l.name = p_resource;
            IF newest <> p_token THEN
                PERFORM @refuse_v1@(p_resource, p_token, newest);
            END IF;
            -- The query above also keeps its lock on a row that was raised while it waited. Two transactions that then wrote the
            -- row would deadlock, so an older token is rejected here.
            SELECT t.token INTO newest FROM @gate@ AS t WHERE t.resource = p_resource;
            IF newest > p_token THEN
                PERFORM @refuse_v1@(p_resource, p_token, newest);
            END IF;
            own := pg_catalog.current_setting('lock_timeout');
            IF own = '0' THEN
                claim := pg_catalog.set_config(
                    'lock_timeout', GREATEST(1, LEAST(p_wait * 1000, 2147483647))::bigint::text, true);
            END IF;
            BEGIN
                INSERT INTO @gate@ AS t (resource, token, updated_at)
                VALUES (p_resource, p_token, pg_catalog.clock_timestamp())
                ON CONFLICT (resource) DO UPDATE SET token = excluded.token, updated_at = excluded.updated_at
                    WHERE t.token <= excluded.token;
                entered := FOUND;
            EXCEPTION WHEN lock_not_available THEN
                PERFORM @refuse_wait_v1@(p_resource);
            END;
            claim := pg_catalog.set_config('lock_timeout', own, true);
            IF NOT entered THEN
                SELECT t.token INTO newest FROM @gate@ AS t WHERE t.resource = p_resource;
                PERFORM @refuse_v1@(p_resource, p_token, newest);
            END IF;
        END IF;
        -- Read again after the gate is locked, because a newer lease may have been granted during the wait.
        SELECT l.token INTO issued FROM @lease@ AS l WHERE l.name = p_resource;
    END IF;
    IF issued <> p_token THEN
        PERFORM @refuse_v1@(p_resource, p_token, issued);
    END IF;
    -- A session keeps the name of every setting until it ends, so there is no setting for each resource. There are 256 settings.
    -- Each lists the claims of this transaction whose hashes begin with its number, newest first.
    IF pg_catalog.split_part(claimed, ',', 1) IS DISTINCT FROM p_token::text THEN
        claim := pg_catalog.set_config(setting, pg_catalog.concat(mark, ' ', p_token, ',', claims), true);
    END IF;
END $$;

-- Raises PF003. The detail lists the sessions that hold the advisory lock and the transaction that alone has locked the gate's
-- row, if these can be determined, or else all sessions that have locked a row of any gate.
CREATE FUNCTION @refuse_wait_v1@(p_resource text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RAISE EXCEPTION 'an older transaction is still inside the gate of "%"', p_resource USING
        ERRCODE = 'PF003',
        DETAIL = (
            WITH holders AS (
                SELECT l.pid, pg_catalog.bool_or(l.locktype = 'advisory') AS named FROM pg_catalog.pg_locks AS l
                WHERE l.granted AND l.pid <> pg_catalog.pg_backend_pid() AND (
                    l.relation = '@gate_text@'::pg_catalog.regclass AND l.mode IN ('RowShareLock', 'RowExclusiveLock')
                    OR l.locktype = 'advisory' AND l.objsubid = 1
                    AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())
                    AND ((l.classid::bigint << 32) | l.objid::bigint)
                        = pg_catalog.hashtextextended(p_resource, '@gate_text@'::pg_catalog.regclass::oid::bigint))
                GROUP BY l.pid
            ), inside AS (
                SELECT a.pid, a.application_name, pg_catalog.host(a.client_addr) AS host,
                    EXTRACT(EPOCH FROM a.xact_start) AS since, pg_catalog.left(a.query, 200) AS query, a.state,
                    h.named OR EXISTS (
                        SELECT FROM @gate@ AS t WHERE t.resource = p_resource AND t.xmax = a.backend_xid) AS alone
                FROM pg_catalog.pg_stat_activity AS a JOIN holders AS h USING (pid)
                WHERE h.named OR a.backend_xid IS NOT NULL
            )
            SELECT pg_catalog.json_build_object(
                'resource', p_resource,
                'milliseconds', (SELECT g.setting::bigint FROM pg_catalog.pg_settings AS g WHERE g.name = 'lock_timeout'),
                'inside', COALESCE(pg_catalog.json_agg(i ORDER BY i.since) FILTER (WHERE i.alone),
                    pg_catalog.json_agg(i ORDER BY i.since), '[]'))::text
            FROM inside AS i);
END $$;

-- Checks before each statement of a writer that its transaction has entered the gate. The setting alone proves nothing: a lock
-- that is held now and the token in the gate's row are checked, so a forged setting, a savepoint that was rolled back or an error
-- that was swallowed changes nothing.
CREATE FUNCTION @check_gate_v1@(p_resource text, p_table text) RETURNS void
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    place oid := '@gate_text@'::pg_catalog.regclass;
    mark text := pg_catalog.md5(place::text || ' ' || p_resource);
    claims text := pg_catalog.split_part(
        pg_catalog.current_setting('pgfence.f' || pg_catalog.left(mark, 2), true), mark || ' ', 2);
    claimed bigint := NULLIF(pg_catalog.split_part(claims, ',', 1), '')::bigint;
BEGIN
    IF claimed IS NULL THEN
        RAISE EXCEPTION '% is fenced by "%" and this transaction brought no token', p_table, p_resource USING
            ERRCODE = 'PF002',
            DETAIL = pg_catalog.json_build_object('resource', p_resource)::text,
            HINT = $hint$Enter the gate as the first statement of the transaction: SELECT @enter_gate_v1@(resource, token)$hint$;
    END IF;
    -- A transaction that is inside holds the lock and gets it again immediately.
    IF claims = claimed || ',' AND pg_catalog.current_setting('transaction_isolation') = 'read committed'
        AND pg_catalog.pg_try_advisory_xact_lock_shared(pg_catalog.hashtextextended(p_resource, place::bigint)) THEN
        PERFORM 1 FROM @gate@ AS t WHERE t.resource = p_resource AND t.token = claimed;
    ELSE
        PERFORM 1 FROM @gate@ AS t WHERE t.resource = p_resource AND t.token = claimed FOR SHARE;
    END IF;
    IF NOT FOUND THEN
        PERFORM @enter_gate_v1@(p_resource, claimed);
    END IF;
END $$;

-- The statement trigger of a table that belongs to one resource. TG_ARGV[0] is the resource. A writer that is inside the gate is
-- accepted here, because calling the check takes as long as the check itself.
CREATE FUNCTION @fence_table_v1@() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    place oid := '@gate_text@'::pg_catalog.regclass;
    mark text := pg_catalog.md5(place::text || ' ' || TG_ARGV[0]);
    claims text := pg_catalog.split_part(
        pg_catalog.current_setting('pgfence.f' || pg_catalog.left(mark, 2), true), mark || ' ', 2);
    claimed bigint := NULLIF(pg_catalog.split_part(claims, ',', 1), '')::bigint;
BEGIN
    IF claims = claimed || ',' AND pg_catalog.current_setting('transaction_isolation') = 'read committed'
        AND pg_catalog.pg_try_advisory_xact_lock_shared(pg_catalog.hashtextextended(TG_ARGV[0], place::bigint)) THEN
        PERFORM 1 FROM @gate@ AS t WHERE t.resource = TG_ARGV[0] AND t.token = claimed;
    ELSE
        PERFORM 1 FROM @gate@ AS t WHERE t.resource = TG_ARGV[0] AND t.token = claimed FOR SHARE;
    END IF;
    IF FOUND THEN
        RETURN NULL;
    END IF;
    PERFORM @check_gate_v1@(TG_ARGV[0], TG_TABLE_NAME);
    RETURN NULL;
END $$;
