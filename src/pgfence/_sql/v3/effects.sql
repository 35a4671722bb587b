-- Attempts at effects, since version 3: the clock may be set back. "locked_until" was computed from the time "locked_at". If this
-- time lies ahead of the clock, the claim ends as long after now as it ended after that time, so that another attempt can take
-- over one TTL later. These functions replace those of version 2, and nothing else differs.

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
        IF r.status = 'in_progress' AND r.locked_at > at AND r.locked_until IS NOT NULL THEN
            CONTINUE WHEN looks = 1;
            RAISE WARNING 'the clock of this server was set back by % s or more after the key "%" was last claimed',
                EXTRACT(EPOCH FROM r.locked_at - at), p_key;
            UPDATE @idempotency_key@ AS k SET locked_at = at, locked_until = at + (k.locked_until - k.locked_at)
            WHERE k.scope = p_scope AND k.key = p_key
            RETURNING k.* INTO STRICT r;
        END IF;
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
    INSERT INTO @idempotency_key@ AS k (scope, key, fingerprint, status, attempt, step, locked_at, locked_until, claim_id, owner,
        host, pid, created_at, expires_at)
    VALUES (p_scope, p_key, p_fingerprint, 'in_progress', next, steps, at, until, p_claim::uuid, p_owner, p_host, p_pid,
        at, until + pg_catalog.make_interval(secs => p_keep))
    ON CONFLICT (scope, key) DO UPDATE SET
        fingerprint = excluded.fingerprint, status = excluded.status, attempt = excluded.attempt, step = excluded.step,
        locked_at = excluded.locked_at, locked_until = excluded.locked_until, claim_id = excluded.claim_id,
        owner = excluded.owner, host = excluded.host, pid = excluded.pid,
        result = NULL, http_status = NULL, http_headers = NULL, http_body = NULL,
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
                UPDATE @idempotency_key@ AS k SET locked_at = at, locked_until = until,
                    expires_at = until + GREATEST(k.expires_at - k.locked_until, '0 s')
                WHERE k.scope = r.scope AND k.key = r.key;
            END IF;
            answer := pg_catalog.jsonb_build_array('ok', EXTRACT(EPOCH FROM until), p_ttls[i]);
        END IF;
        answers := answers || answer;
    END LOOP;
    RETURN pg_catalog.array_to_json(answers)::text;
END $$;
