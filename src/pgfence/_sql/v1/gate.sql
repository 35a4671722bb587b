-- The fence. A transaction enters the gate of its resource first, before its first read, and keeps it locked until it ends.
--
-- The tokens with which a transaction has entered gates are stored in settings of its session, each with a hash of the resource
-- and the oid of the gate table, because a database may have several installations, and the tokens of each start at 1.

-- Enters a gate. A token that is not the newest is rejected with SQLSTATE PF001 and a JSON detail. A newer holder waits until the
-- older transactions inside have ended, for at most p_wait seconds or, if the session has its own lock_timeout, that time. Then
-- it raises PF003, whose JSON detail lists the sessions that may be inside.
CREATE FUNCTION @enter_gate_v1@(p_resource text, p_token bigint, p_wait double precision DEFAULT 30) RETURNS void
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    newest bigint;
    claim text;
    own text;
    entered boolean;
    mark text := pg_catalog.md5('@gate_text@'::pg_catalog.regclass::oid::text || ' ' || p_resource);
    setting text := 'pgfence.f' || pg_catalog.left(mark, 2);
    claims text := pg_catalog.current_setting(setting, true);
BEGIN
    IF p_token IS NULL OR p_token < 1 THEN
        RAISE EXCEPTION 'a fencing token must be 1 or more, not %', p_token USING ERRCODE = '22023';
    END IF;
    -- The condition on the token is part of the locking query, so that writers with the same token run concurrently, and three
    -- new holders that raise the gate at the same time do not deadlock.
    PERFORM 1 FROM @gate@ AS t WHERE t.resource = p_resource AND t.token = p_token FOR SHARE;
    IF NOT FOUND THEN
        SELECT l.token INTO newest FROM @lease@ AS l WHERE l.name = p_resource;
        IF newest <> p_token THEN
            PERFORM @refuse_v1@(p_resource, p_token, newest);
        END IF;
        -- The query above also keeps its lock on a row that was raised while it waited. Two transactions that then wrote the row
        -- would deadlock, so an older token is rejected here.
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
    SELECT l.token INTO newest FROM @lease@ AS l WHERE l.name = p_resource;
    IF newest <> p_token THEN
        PERFORM @refuse_v1@(p_resource, p_token, newest);
    END IF;
    -- A session keeps the name of every setting until it ends, so there is no setting for each resource. There are 256 settings.
    -- Each lists the claims of this transaction whose hashes begin with its number, newest first.
    IF pg_catalog.split_part(pg_catalog.split_part(claims, mark || ' ', 2), ',', 1) IS DISTINCT FROM p_token::text THEN
        claim := pg_catalog.set_config(setting, pg_catalog.concat(mark, ' ', p_token, ',', claims), true);
    END IF;
END $$;

-- Enters several gates in one fixed order. p_wait applies to each of them.
CREATE FUNCTION @enter_gates_v1@(p_resources text[], p_tokens bigint[], p_wait double precision DEFAULT 30) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    g record;
BEGIN
    FOR g IN
        SELECT u.resource, u.token FROM ROWS FROM (pg_catalog.unnest(p_resources), pg_catalog.unnest(p_tokens))
            AS u(resource, token) ORDER BY u.resource COLLATE "C"
    LOOP
        PERFORM @enter_gate_v1@(g.resource, g.token, p_wait);
    END LOOP;
END $$;

CREATE FUNCTION @refuse_v1@(p_resource text, p_token bigint, p_newest bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RAISE EXCEPTION 'token % for "%" is refused: the newest is %', p_token, p_resource, p_newest USING
        ERRCODE = 'PF001',
        DETAIL = pg_catalog.json_build_object('resource', p_resource, 'token', p_token, 'newest', p_newest)::text;
END $$;

-- Raises PF003. The detail lists the transaction that alone has locked the gate's row, if it can be determined, or else all
-- transactions that have entered any gate.
CREATE FUNCTION @refuse_wait_v1@(p_resource text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RAISE EXCEPTION 'an older transaction is still inside the gate of "%"', p_resource USING
        ERRCODE = 'PF003',
        DETAIL = (
            WITH inside AS (
                SELECT a.pid, a.application_name, pg_catalog.host(a.client_addr) AS host,
                    EXTRACT(EPOCH FROM a.xact_start) AS since, pg_catalog.left(a.query, 200) AS query, a.state,
                    EXISTS (SELECT FROM @gate@ AS t WHERE t.resource = p_resource AND t.xmax = a.backend_xid) AS alone
                FROM pg_catalog.pg_stat_activity AS a
                WHERE a.backend_xid IS NOT NULL AND a.pid <> pg_catalog.pg_backend_pid() AND EXISTS (
                    SELECT FROM pg_catalog.pg_locks AS l
                    WHERE l.pid = a.pid AND l.granted AND l.relation = '@gate_text@'::pg_catalog.regclass)
            )
            SELECT pg_catalog.json_build_object(
                'resource', p_resource,
                'milliseconds', (SELECT g.setting::bigint FROM pg_catalog.pg_settings AS g WHERE g.name = 'lock_timeout'),
                'inside', COALESCE(pg_catalog.json_agg(i ORDER BY i.since) FILTER (WHERE i.alone),
                    pg_catalog.json_agg(i ORDER BY i.since), '[]'))::text
            FROM inside AS i);
END $$;

-- Checks before each statement of a writer that its transaction has entered the gate. The setting alone proves nothing: the
-- gate's row is checked, so a forged setting, a savepoint that was rolled back or an error that was swallowed changes nothing.
CREATE FUNCTION @check_gate_v1@(p_resource text, p_table text) RETURNS void
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    mark text := pg_catalog.md5('@gate_text@'::pg_catalog.regclass::oid::text || ' ' || p_resource);
    claimed bigint := NULLIF(pg_catalog.split_part(pg_catalog.split_part(
        pg_catalog.current_setting('pgfence.f' || pg_catalog.left(mark, 2), true), mark || ' ', 2), ',', 1), '')::bigint;
BEGIN
    IF claimed IS NULL THEN
        RAISE EXCEPTION '% is fenced by "%" and this transaction brought no token', p_table, p_resource USING
            ERRCODE = 'PF002',
            DETAIL = pg_catalog.json_build_object('resource', p_resource)::text,
            HINT = $hint$Enter the gate as the first statement of the transaction: SELECT @enter_gate_v1@(resource, token)$hint$;
    END IF;
    PERFORM 1 FROM @gate@ AS t WHERE t.resource = p_resource AND t.token = claimed FOR SHARE;
    IF NOT FOUND THEN
        PERFORM @enter_gate_v1@(p_resource, claimed);
    END IF;
END $$;

-- The statement trigger of a table that belongs to one resource. TG_ARGV[0] is the resource. A writer that is inside the gate is
-- accepted here, because calling the check takes as long as the check itself.
CREATE FUNCTION @fence_table_v1@() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    mark text := pg_catalog.md5('@gate_text@'::pg_catalog.regclass::oid::text || ' ' || TG_ARGV[0]);
BEGIN
    PERFORM 1 FROM @gate@ AS t WHERE t.resource = TG_ARGV[0] AND t.token = NULLIF(pg_catalog.split_part(pg_catalog.split_part(
        pg_catalog.current_setting('pgfence.f' || pg_catalog.left(mark, 2), true), mark || ' ', 2), ',', 1), '')::bigint FOR SHARE;
    IF FOUND THEN
        RETURN NULL;
    END IF;
    PERFORM @check_gate_v1@(TG_ARGV[0], TG_TABLE_NAME);
    RETURN NULL;
END $$;

-- The row trigger of a table that contains rows of many resources. TG_ARGV is text, column, text, column, ..., text.
CREATE FUNCTION @fence_row_v1@() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    old_resource text := '';
    new_resource text := '';
    old_row jsonb;
    new_row jsonb;
    named text := '';
BEGIN
    IF COALESCE(pg_catalog.pg_column_size(OLD), 0) + COALESCE(pg_catalog.pg_column_size(NEW), 0) < 16384 THEN
        BEGIN
            old_row := pg_catalog.to_jsonb(OLD);
            new_row := pg_catalog.to_jsonb(NEW);
        EXCEPTION WHEN data_exception THEN
            old_row := NULL;
        END;
    END IF;
    IF old_row IS NOT NULL OR new_row IS NOT NULL THEN
        FOR i IN 0 .. TG_NARGS - 1 LOOP
            old_resource := old_resource || CASE WHEN i % 2 = 0 THEN TG_ARGV[i] ELSE old_row ->> TG_ARGV[i] END;
            new_resource := new_resource || CASE WHEN i % 2 = 0 THEN TG_ARGV[i] ELSE new_row ->> TG_ARGV[i] END;
        END LOOP;
    ELSE
        -- If a row is large, or contains a value that jsonb cannot represent, only these columns are read. For other rows, this
        -- would take longer.
        FOR i IN 0 .. TG_NARGS - 1 LOOP
            named := named || CASE WHEN i = 0 THEN 'SELECT ' ELSE ' || ' END || CASE WHEN i % 2 = 0
                THEN pg_catalog.quote_literal(TG_ARGV[i])
                ELSE '(pg_catalog.to_jsonb(($1).' || pg_catalog.quote_ident(TG_ARGV[i]) || $path$) #>> '{}')$path$ END;
        END LOOP;
        IF TG_OP <> 'INSERT' THEN
            EXECUTE named INTO old_resource USING OLD;
        END IF;
        IF TG_OP <> 'DELETE' THEN
            EXECUTE named INTO new_resource USING NEW;
        END IF;
    END IF;
    IF TG_OP <> 'INSERT' THEN
        IF old_resource IS NULL THEN
            RAISE EXCEPTION 'a row of % names no resource: a column of it is NULL', TG_TABLE_NAME USING ERRCODE = 'PF002';
        END IF;
        PERFORM @check_gate_v1@(old_resource, TG_TABLE_NAME);
    END IF;
    IF TG_OP <> 'DELETE' AND (TG_OP = 'INSERT' OR new_resource IS DISTINCT FROM old_resource) THEN
        IF new_resource IS NULL THEN
            RAISE EXCEPTION 'a row of % names no resource: a column of it is NULL', TG_TABLE_NAME USING ERRCODE = 'PF002';
        END IF;
        PERFORM @check_gate_v1@(new_resource, TG_TABLE_NAME);
    END IF;
    RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
END $$;

-- TRUNCATE deletes the rows of all resources, so no token allows it.
CREATE FUNCTION @fence_truncate_v1@() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% holds rows of many resources and cannot be truncated under a fence', TG_TABLE_NAME USING
        ERRCODE = 'PF002', HINT = 'Delete the rows of one resource, or drop the fence first.';
END $$;

-- Saves a checkpoint, from which the next holder can continue, in the caller's transaction, after entering the gate. It is in a
-- separate table, because a lock on the lease's row until the end of that transaction would block the heartbeat.
CREATE FUNCTION @save_checkpoint_v1@(p_name text, p_token bigint, p_data text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM @enter_gate_v1@(p_name, p_token);
    INSERT INTO @checkpoint@ AS c (name, token, data, updated_at)
    VALUES (p_name, p_token, p_data::jsonb, pg_catalog.clock_timestamp())
    ON CONFLICT (name) DO UPDATE SET token = excluded.token, data = excluded.data, updated_at = excluded.updated_at;
END $$;
