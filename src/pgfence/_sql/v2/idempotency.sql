-- Idempotency keys in the caller's own transaction.
--
-- Two transaction locks protect the row: one for scope and key, and one for scope, key and fingerprint, which is taken first. A
-- transaction that finds the latter taken waits for an equal request. One that finds only the former taken, by a transaction with
-- another fingerprint, returns at once that a different request is in progress.

CREATE FUNCTION @claim_key_v1@(p_scope text, p_key text, p_fingerprint bytea, p_keep double precision, p_wait double precision)
RETURNS text LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    r @idempotency_key@;
    place bigint := pg_catalog.pg_typeof(r)::oid::bigint;
    named bigint := pg_catalog.hashtextextended(p_scope || pg_catalog.chr(31) || p_key, place);
    family integer := (named >> 32)::integer;
    member integer := (pg_catalog.hashtextextended(COALESCE(pg_catalog.encode(p_fingerprint, 'hex'), ''), named) >> 32)::integer;
    began timestamptz := pg_catalog.clock_timestamp();
    lock_timeout text := pg_catalog.current_setting('lock_timeout');
    remaining double precision;
    outcome text;
BEGIN
    FOR tries IN 1..1000 LOOP
        -- Each look is a separate statement, so that under READ COMMITTED it sees what was committed during the wait.
        SELECT * INTO r FROM @idempotency_key@ AS k WHERE k.scope = p_scope AND k.key = p_key;
        IF FOUND AND r.status = 'in_progress' AND r.locked_until IS NULL THEN
            RETURN 'own';
        ELSIF FOUND AND r.expires_at > pg_catalog.clock_timestamp() THEN
            IF r.fingerprint IS DISTINCT FROM p_fingerprint THEN
                RETURN 'reused';
            ELSIF r.status <> 'free' THEN
                RETURN CASE WHEN r.status IN ('done', 'failed') THEN pg_catalog.concat(r.status, ' ', r.result::text)
                    ELSE 'busy' END;
            END IF;
        END IF;
        -- An error inside this block releases the block's locks and restores its settings.
        BEGIN
            IF NOT pg_catalog.pg_try_advisory_xact_lock(family, member) THEN
                remaining := p_wait - EXTRACT(epoch FROM pg_catalog.clock_timestamp() - began);
                IF remaining <= 0 THEN
                    RETURN 'busy';
                END IF;
                PERFORM pg_catalog.set_config('lock_timeout', CASE WHEN remaining > 2000000 THEN '0'
                    ELSE GREATEST(1, (remaining * 1000)::bigint)::text END, true);
                PERFORM pg_catalog.pg_advisory_xact_lock(family, member);
                IF EXISTS (SELECT FROM @idempotency_key@ AS k WHERE k.scope = p_scope AND k.key = p_key
                    AND k.status <> 'free' AND k.expires_at > pg_catalog.clock_timestamp()) THEN
                    RAISE EXCEPTION USING ERRCODE = 'PF008';
                END IF;
                PERFORM pg_catalog.set_config('lock_timeout', lock_timeout, true);
            END IF;
            IF NOT pg_catalog.pg_try_advisory_xact_lock(named) THEN
                IF EXISTS (SELECT FROM pg_catalog.pg_locks AS n JOIN pg_catalog.pg_locks AS f USING (virtualtransaction, database)
                    WHERE n.locktype = 'advisory' AND n.granted AND n.objsubid = 1 AND n.classid = family::oid
                    AND n.objid = ((named << 32) >> 32)::integer::oid
                    AND f.locktype = 'advisory' AND f.granted AND f.objsubid = 2 AND f.classid = family::oid
                    AND f.objid <> member::oid
                    AND database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())
                ) THEN
                    RAISE EXCEPTION USING ERRCODE = 'PF009';
                END IF;
                -- A transaction that ends releases its locks one after the other.
                IF tries > 20 AND p_wait <= EXTRACT(epoch FROM pg_catalog.clock_timestamp() - began) THEN
                    RAISE EXCEPTION USING ERRCODE = 'lock_not_available';
                END IF;
                PERFORM pg_catalog.pg_sleep(0.001);
                RAISE EXCEPTION USING ERRCODE = 'PF008';
            END IF;
            INSERT INTO @idempotency_key@ AS k (scope, key, fingerprint, status, created_at, expires_at)
            VALUES (p_scope, p_key, p_fingerprint, 'in_progress', pg_catalog.clock_timestamp(),
                pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => p_keep))
            ON CONFLICT (scope, key) DO UPDATE SET
                fingerprint = excluded.fingerprint, status = excluded.status, attempt = 1, step = NULL,
                locked_until = NULL, claim_id = NULL, owner = NULL, host = NULL, pid = NULL, result = NULL,
                http_status = NULL, http_headers = NULL, http_body = NULL,
                created_at = excluded.created_at, expires_at = excluded.expires_at
                WHERE k.status = 'free' AND k.fingerprint IS NOT DISTINCT FROM p_fingerprint
                    OR k.expires_at <= pg_catalog.clock_timestamp()
            RETURNING 'fresh' INTO outcome;
            IF outcome IS NULL THEN
                RAISE EXCEPTION USING ERRCODE = 'PF008';
            END IF;
            RETURN outcome;
        EXCEPTION
            WHEN SQLSTATE 'PF008' THEN NULL;  -- look again
            WHEN SQLSTATE 'PF009' THEN RETURN 'reused';
            WHEN lock_not_available THEN RETURN 'busy';
            WHEN deadlock_detected THEN RETURN 'deadlock';
            WHEN serialization_failure THEN RETURN 'snapshot';
        END;
    END LOOP;
    RETURN 'busy';
END $$;

CREATE FUNCTION @finish_key_v1@(p_scope text, p_key text, p_status text, p_result text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
BEGIN
    UPDATE @idempotency_key@ AS k SET status = p_status, result = p_result::jsonb,
        expires_at = pg_catalog.clock_timestamp() + (k.expires_at - k.created_at)
    WHERE k.scope = p_scope AND k.key = p_key AND k.status = 'in_progress' AND k.locked_until IS NULL;
    RETURN FOUND;
END $$;

-- Rejects COMMIT if a key that was claimed in the transaction has no result.
CREATE FUNCTION @check_key_v1@() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    IF EXISTS (SELECT FROM @idempotency_key@ AS k WHERE k.scope = NEW.scope AND k.key = NEW.key
        AND k.status = 'in_progress' AND k.locked_until IS NULL) THEN
        RAISE EXCEPTION 'what the idempotency key % of scope % was claimed for has no result: this transaction must be rolled back',
            pg_catalog.quote_literal(NEW.key), pg_catalog.quote_literal(NEW.scope) USING ERRCODE = 'PF004';
    END IF;
    RETURN NULL;
END $$;
