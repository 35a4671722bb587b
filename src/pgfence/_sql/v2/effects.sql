-- Attempts at effects outside the database. The claim is committed first, and all later statements contain its id. Each function
-- is one round trip in a separate transaction: it locks the row first, then reads the clock, and only then decides. For renewals,
-- the name of a row is scope, U+001F and key.

-- Returns the outcome: "granted", with the steps that earlier attempts have saved; "busy", with the seconds until the claim ends;
-- "done" or "failed", with the stored result; "reused", if the key has another payload; or "lost", if the outcome of the last
-- attempt is unknown and p_takeover allows no other attempt.
CREATE FUNCTION @claim_effect_v1@(
    p_scope text, p_key text, p_fingerprint bytea, p_claim text, p_ttl double precision, p_keep double precision,
    p_takeover boolean, p_owner text, p_host text, p_pid integer
) RETURNS TABLE (
    outcome text, attempt integer, locked_until timestamptz, remaining double precision, step text, result text,
    http_status integer, http_headers text, http_body bytea, owner text, host text, pid integer, since timestamptz
) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    r @idempotency_key@;
    place bigint := pg_catalog.pg_typeof(r)::oid::bigint;
    named bigint := pg_catalog.hashtextextended(p_scope || pg_catalog.chr(31) || p_key, place);
    family integer := (named >> 32)::integer;
    at timestamptz;
    until timestamptz;
    kept boolean;
    next integer;
    steps jsonb;
    told text;
BEGIN
    -- The first look takes no lock. If it finds the key free, the second look repeats it behind the locks.
    FOR looks IN 1..2 LOOP
        IF looks = 1 THEN
            SELECT k.* INTO r FROM @idempotency_key@ AS k WHERE k.scope = p_scope AND k.key = p_key;
        ELSE
            -- An attempt that was lost in a crash would be repeated under the same number.
            IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
                PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
            END IF;
            PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
            -- A transaction that claims the key takes the same two locks, and may be in progress; see claim_key_v1.
            IF NOT pg_catalog.pg_try_advisory_xact_lock(family, (pg_catalog.hashtextextended(
                COALESCE(pg_catalog.encode(p_fingerprint, 'hex'), ''), named) >> 32)::integer) THEN
                told := 'busy';
            ELSIF NOT pg_catalog.pg_try_advisory_xact_lock(named) THEN
                told := CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_locks AS n JOIN pg_catalog.pg_locks AS f USING (virtualtransaction, database)
                    WHERE n.locktype = 'advisory' AND n.granted AND n.objsubid = 1 AND n.classid = family::oid
                    AND n.objid = ((named << 32) >> 32)::integer::oid
                    AND f.locktype = 'advisory' AND f.granted AND f.objsubid = 2 AND f.classid = family::oid
                    AND n.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
                    AND database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())
                ) THEN 'reused' ELSE 'busy' END;
            END IF;
            IF told IS NOT NULL THEN
                RETURN QUERY SELECT told, NULL::integer, NULL::timestamptz, 0::double precision, NULL::text, NULL::text,
                    NULL::integer, NULL::text, NULL::bytea, NULL::text, NULL::text, NULL::integer, NULL::timestamptz;
                RETURN;
            END IF;
            SELECT k.* INTO r FROM @idempotency_key@ AS k WHERE k.scope = p_scope AND k.key = p_key FOR NO KEY UPDATE;
        END IF;
        at := pg_catalog.clock_timestamp();
        -- A claim that has not ended counts, even if the row has expired.
        kept := COALESCE(r.expires_at > at OR (r.status = 'in_progress' AND r.locked_until > at), false);
        IF kept THEN
            told := CASE
                WHEN r.fingerprint IS DISTINCT FROM p_fingerprint THEN 'reused'
                WHEN r.status IN ('done', 'failed') THEN r.status
                WHEN r.status = 'in_progress' AND COALESCE(r.locked_until > at, true) THEN 'busy'
                WHEN r.status = 'in_progress' AND NOT p_takeover THEN 'lost' END;
        ELSE
            told := NULL;
        END IF;
        IF told IS NOT NULL THEN
            RETURN QUERY SELECT told, r.attempt, r.locked_until,
                GREATEST(0, EXTRACT(epoch FROM r.locked_until - at))::double precision, NULL::text,
                r.result::text, r.http_status, r.http_headers::text, r.http_body, r.owner, r.host, r.pid, r.created_at;
            RETURN;
        END IF;
    END LOOP;
    until := at + pg_catalog.make_interval(secs => p_ttl);
    -- Numbers continue after a lost or failed attempt, and start again if the key was finished and has expired.
    next := CASE WHEN r.scope IS NULL OR (NOT kept AND r.status IN ('done', 'failed')) THEN 1 ELSE r.attempt + 1 END;
    steps := CASE WHEN kept THEN r.step END;
    INSERT INTO @idempotency_key@ AS k (scope, key, fingerprint, status, attempt, step, locked_until, claim_id, owner, host, pid,
        created_at, expires_at)
    VALUES (p_scope, p_key, p_fingerprint, 'in_progress', next, steps, until, p_claim::uuid, p_owner, p_host, p_pid,
        at, until + pg_catalog.make_interval(secs => p_keep))
    ON CONFLICT (scope, key) DO UPDATE SET
        fingerprint = excluded.fingerprint, status = excluded.status, attempt = excluded.attempt, step = excluded.step,
        locked_until = excluded.locked_until, claim_id = excluded.claim_id, owner = excluded.owner, host = excluded.host,
        pid = excluded.pid, result = NULL, http_status = NULL, http_headers = NULL, http_body = NULL,
        created_at = CASE WHEN kept THEN k.created_at ELSE excluded.created_at END,
        expires_at = GREATEST(k.expires_at, excluded.expires_at)
        -- Without these locks, a key is written only manually.
        WHERE r.scope IS NOT NULL;
    RETURN QUERY SELECT CASE WHEN FOUND THEN 'granted' ELSE 'busy' END, next, until, p_ttl, steps::text, NULL::text,
        NULL::integer, NULL::text, NULL::bytea, p_owner, p_host, p_pid, at;
END $$;

-- Renews several attempts. Returns the same values as renew_leases_v1. For an attempt that its holder has finished, it returns
-- "ok", because its heartbeat is about to stop, and changes nothing.
CREATE FUNCTION @renew_keys_v1@(
    p_names text[], p_claims text[], p_attempts bigint[], p_ttls double precision[]
) RETURNS text LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    r @idempotency_key@;
    at timestamptz;
    until timestamptz;
    named text;
    answers jsonb[] := '{}';
    answer jsonb;
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    FOR i IN 1 .. COALESCE(pg_catalog.cardinality(p_names), 0) LOOP
        named := pg_catalog.split_part(p_names[i], pg_catalog.chr(31), -1);
        SELECT k.* INTO r FROM @idempotency_key@ AS k
        WHERE k.scope = pg_catalog.left(p_names[i], -1 - pg_catalog.length(named)) AND k.key = named
        FOR NO KEY UPDATE SKIP LOCKED;
        at := pg_catalog.clock_timestamp();
        until := at + pg_catalog.make_interval(secs => p_ttls[i]);
        IF NOT FOUND THEN
            PERFORM 1 FROM @idempotency_key@ AS k
            WHERE k.scope = pg_catalog.left(p_names[i], -1 - pg_catalog.length(named)) AND k.key = named;
            answer := CASE WHEN FOUND THEN '["busy"]'::jsonb ELSE '["lost", "superseded"]'::jsonb END;
        ELSIF r.claim_id IS DISTINCT FROM p_claims[i]::uuid OR r.attempt <> p_attempts[i] THEN
            answer := '["lost", "superseded"]'::jsonb;
        ELSIF r.status = 'in_progress' AND r.locked_until <= at THEN
            answer := '["lost", "expired"]'::jsonb;
        ELSE
            IF r.status = 'in_progress' THEN
                -- The row, with its steps, is kept as long after the claim as before the renewal.
                UPDATE @idempotency_key@ AS k SET locked_until = until,
                    expires_at = until + GREATEST(k.expires_at - k.locked_until, '0 s')
                WHERE k.scope = r.scope AND k.key = r.key;
            END IF;
            answer := pg_catalog.jsonb_build_array('ok', EXTRACT(EPOCH FROM until), p_ttls[i]);
        END IF;
        answers := answers || answer;
    END LOOP;
    RETURN pg_catalog.array_to_json(answers)::text;
END $$;

-- Saves what a step of an attempt returned, once. Returns the number of the current attempt. Another number, or -1, means that
-- the attempt was lost, and NULL that the key does not exist.
CREATE FUNCTION @save_step_v1@(p_name text, p_claim text, p_attempt bigint, p_step text, p_value text) RETURNS integer
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    named text := pg_catalog.split_part(p_name, pg_catalog.chr(31), -1);
    whose text := pg_catalog.left(p_name, -1 - pg_catalog.length(named));
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    UPDATE @idempotency_key@ AS k
    SET step = pg_catalog.jsonb_build_object(p_step, p_value::jsonb) || COALESCE(k.step, '{}')
    WHERE k.scope = whose AND k.key = named AND k.claim_id = p_claim::uuid AND k.attempt = p_attempt
        AND k.status = 'in_progress';
    IF FOUND THEN
        RETURN p_attempt;
    END IF;
    RETURN (SELECT CASE k.attempt WHEN p_attempt THEN -1 ELSE k.attempt END
        FROM @idempotency_key@ AS k WHERE k.scope = whose AND k.key = named);
END $$;

-- Stores the outcome of an attempt, once. Returns the same values as save_step_v1, and the same again if it is repeated after a
-- lost response. Without a status, it stores nothing, and returns 0 if nothing is stored. In the caller's own transaction, it
-- keeps the row locked to the end, so that no attempt takes over in between. There, a result other than the attempt is an error,
-- so that nothing of a late attempt is committed.
CREATE FUNCTION @finish_effect_v1@(
    p_name text, p_claim text, p_attempt bigint, p_keep double precision, p_status text, p_result text,
    p_http_status integer, p_http_headers text, p_http_body bytea, p_own boolean
) RETURNS integer LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    named text := pg_catalog.split_part(p_name, pg_catalog.chr(31), -1);
    whose text := pg_catalog.left(p_name, -1 - pg_catalog.length(named));
    r @idempotency_key@;
    answer integer := p_attempt;
    before text := pg_catalog.current_setting('lock_timeout');
BEGIN
    IF p_own AND pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    SELECT k.* INTO r FROM @idempotency_key@ AS k WHERE k.scope = whose AND k.key = named FOR NO KEY UPDATE;
    PERFORM pg_catalog.set_config('lock_timeout', before, true);
    IF r.claim_id IS DISTINCT FROM p_claim::uuid OR r.attempt <> p_attempt THEN
        answer := CASE r.attempt WHEN p_attempt THEN -1 ELSE r.attempt END;
    ELSIF r.status = 'in_progress' AND p_status IS NULL THEN
        answer := 0;
    ELSIF r.status = 'in_progress' THEN
        UPDATE @idempotency_key@ AS k SET
            status = p_status, locked_until = NULL, result = p_result::jsonb, http_status = p_http_status,
            http_headers = p_http_headers::jsonb, http_body = p_http_body,
            expires_at = pg_catalog.clock_timestamp()
                + GREATEST(k.expires_at - k.locked_until, pg_catalog.make_interval(secs => p_keep))
        WHERE k.scope = whose AND k.key = named;
    ELSIF r.status NOT IN ('done', 'failed') THEN
        answer := -1;
    ELSIF NOT p_own THEN
        answer := -2;  -- the end of this attempt is already committed
    END IF;
    IF NOT p_own AND answer IS DISTINCT FROM p_attempt THEN
        RAISE EXCEPTION 'attempt % has ended, or does not count any more: this transaction must be rolled back', p_attempt
            USING ERRCODE = 'PF005', DETAIL = pg_catalog.jsonb_build_object('newest', answer)::text;
    END IF;
    RETURN answer;
END $$;

-- Frees the key of an attempt that is known to have had no effect. Returns the same values as release_lease_v1.
CREATE FUNCTION @free_effect_v1@(p_name text, p_claim text, p_attempt bigint) RETURNS text
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    named text := pg_catalog.split_part(p_name, pg_catalog.chr(31), -1);
BEGIN
    PERFORM pg_catalog.set_config('synchronous_commit', 'off', true);  -- a claim whose release was lost in a crash expires
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    UPDATE @idempotency_key@ AS k SET status = 'free', locked_until = NULL
    WHERE k.scope = pg_catalog.left(p_name, -1 - pg_catalog.length(named)) AND k.key = named
        AND k.claim_id = p_claim::uuid AND k.attempt = p_attempt AND k.status = 'in_progress';
    RETURN CASE WHEN FOUND THEN 'released' ELSE 'superseded' END;
END $$;

-- Ends a claim whose response was lost, by the id that the client chose for it. Nothing was done under it.
CREATE FUNCTION @forget_effect_v1@(p_name text, p_claim text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    named text := pg_catalog.split_part(p_name, pg_catalog.chr(31), -1);
    whose text := pg_catalog.left(p_name, -1 - pg_catalog.length(named));
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', '2s', true);
    -- The row is locked first, because the claim may not be committed yet, and its row would not be found by its id.
    PERFORM 1 FROM @idempotency_key@ AS k WHERE k.scope = whose AND k.key = named FOR NO KEY UPDATE;
    UPDATE @idempotency_key@ AS k SET status = 'free', locked_until = NULL
    WHERE k.scope = whose AND k.key = named AND k.claim_id = p_claim::uuid AND k.status = 'in_progress';
    RETURN FOUND;
END $$;
