CREATE INDEX ix_batch_group_group_id ON batch_group (group_id)
CREATE INDEX ix_batch_owned ON batch (owner) WHERE state = 'leased'
CREATE INDEX ix_batch_run ON batch (run_id, id)
CREATE INDEX ix_event_run_id_kind_at ON event (run_id, kind, at)
CREATE INDEX ix_request_open ON request (worker_id) WHERE finished_at IS NULL
CREATE INDEX ix_request_sample_id ON request (sample_id)
CREATE INDEX ix_sample_claim ON sample (run_id, priority, status, group_id, index) WHERE owner IS NULL AND closed = 0 AND status IN ('pending', 'aborted')
CREATE INDEX ix_sample_group_evaluation ON sample_group (evaluation_id) WHERE evaluation_id IS NOT NULL
CREATE INDEX ix_sample_group_prompt_id ON sample_group (prompt_id)
CREATE INDEX ix_sample_group_state ON sample_group (run_id, state, number)
CREATE INDEX ix_sample_group_window ON sample_group (run_id, number) WHERE state IN ('open', 'scoring', 'ready')
CREATE INDEX ix_sample_owned ON sample (owner) WHERE owner IS NOT NULL
CREATE INDEX ix_sample_parent ON sample (parent_id) WHERE parent_id IS NOT NULL
CREATE INDEX ix_sample_resumed ON sample (run_id) WHERE n_resumes > 0
CREATE INDEX ix_sample_run_status ON sample (run_id, status)
CREATE INDEX ix_segment_array_sidecar ON segment_array (sidecar) WHERE sidecar IS NOT NULL
CREATE INDEX ix_segment_array_size ON segment_array (name, n_bytes, sample_id)
CREATE INDEX ix_stage_claim ON stage (run_id, id) WHERE owner IS NULL AND status = 'pending'
CREATE INDEX ix_stage_group_id ON stage (group_id)
CREATE INDEX ix_stage_owned ON stage (owner) WHERE owner IS NOT NULL
CREATE INDEX ix_worker_live ON worker (id) WHERE state = 'live'
CREATE UNIQUE INDEX uq_batch_group_live ON batch_group (group_id) WHERE state IN ('leased', 'committed')
CREATE UNIQUE INDEX uq_batch_step ON batch (run_id, timeline, step) WHERE state IN ('leased', 'committed')
CREATE UNIQUE INDEX uq_engine_live_url ON engine (url) WHERE state <> 'gone'
CREATE UNIQUE INDEX uq_prompt_dataset_position ON prompt (run_id, dataset, dataset_position)
CREATE UNIQUE INDEX uq_sample_group_import ON sample_group (run_id, import_key) WHERE import_key IS NOT NULL
CREATE UNIQUE INDEX uq_stage_group ON stage (group_id, incarnation, name) WHERE sample_id IS NULL
CREATE VIEW abort_causes AS SELECT stopped.run_id, stopped.run, stopped.kind, stopped.reason, stopped.engine, stopped.worker_id, stopped.version, count(*) AS times, CAST(sum(coalesce(stopped.tokens, 0)) AS BIGINT) AS tokens_kept, CAST(sum(coalesce(stopped.lost_tokens, 0)) AS BIGINT) AS tokens_lost, CAST(sum(coalesce(stopped.prefilled_again, 0)) AS BIGINT) AS prefilled_again FROM (SELECT run.id AS run_id, run.name AS run, stop.kind AS kind, stop.reason AS reason, call.engine AS engine, stop.worker_id AS worker_id, (SELECT max(segment.version_max) AS max_1 FROM segment WHERE segment.sample_id = call.sample_id AND segment.incarnation = call.incarnation AND segment.request_rid = call.rid) AS version, stop.tokens AS tokens, call.lost_tokens AS lost_tokens, (SELECT CASE WHEN (later.resumed_tokens > 0) THEN later.prompt_tokens - coalesce(later.cached_tokens, 0) END AS anon_1 FROM request AS later WHERE later.sample_id = call.sample_id AND later.incarnation = call.incarnation AND later.id > call.id ORDER BY later.id LIMIT 1 OFFSET 0) AS prefilled_again FROM (SELECT event.run_id AS run_id, event.kind AS kind, event.reason AS reason, event.worker_id AS worker_id, event.tokens AS tokens, (SELECT request.id FROM request WHERE request.sample_id = event.sample_id AND request.worker_id = event.worker_id AND request.started_at <= event.at ORDER BY request.id DESC LIMIT 1 OFFSET 0) AS call_id FROM event WHERE event.kind IN ('abort', 'reap', 'fail')) AS stop JOIN run ON run.id = stop.run_id LEFT OUTER JOIN request AS call ON call.id = stop.call_id) AS stopped GROUP BY stopped.run_id, stopped.run, stopped.kind, stopped.reason, stopped.engine, stopped.worker_id, stopped.version
CREATE VIEW batch_steps AS SELECT run.id AS run_id, run.name AS run, batch.id AS batch_id, batch.timeline, batch.step, batch.state, batch.current_version, batch.n_groups, batch.n_samples, batch.n_tokens, (SELECT max(batch_group.staleness) AS max_1 FROM batch_group WHERE batch_group.batch_id = batch.id) AS staleness_max, (SELECT avg(CAST(batch_group.staleness AS DOUBLE)) AS avg_1 FROM batch_group WHERE batch_group.batch_id = batch.id) AS staleness_mean, (SELECT avg(CAST(CASE WHEN (abs(sample.reward) < CAST(1e-100 AS DOUBLE)) THEN CAST(0.0 AS DOUBLE) WHEN (sample.reward > CAST(1e+50 AS DOUBLE)) THEN CAST(1e+50 AS DOUBLE) WHEN (sample.reward < CAST(-1e+50 AS DOUBLE)) THEN CAST(-1e+50 AS DOUBLE) ELSE sample.reward END AS DOUBLE)) AS avg_2 FROM batch_group JOIN sample ON sample.group_id = batch_group.group_id WHERE batch_group.batch_id = batch.id AND sample.status IN ('completed', 'truncated')) AS reward_mean, (SELECT avg(CASE WHEN (sample.status = 'truncated') THEN CAST(1 AS DOUBLE) ELSE CAST(0 AS DOUBLE) END) AS avg_3 FROM batch_group JOIN sample ON sample.group_id = batch_group.group_id WHERE batch_group.batch_id = batch.id AND sample.status IN ('completed', 'truncated')) AS truncated_ratio, batch.created_at, batch.settled_at FROM batch JOIN run ON run.id = batch.run_id
CREATE VIEW ready_groups AS SELECT ready.run_id, ready.run, ready.group_id, ready.number, ready.prompt_id, ready.dataset, ready.epoch, ready.n_samples, ready.n_failed, ready.n_tokens, ready.reward_mean, ready.reward_std, ready.oldest_version, ready.staleness_oldest, ready.staleness_newest, ready.staleness_mean, ready.max_staleness, CAST(CASE WHEN (ready.mode = 'newest') THEN ready.staleness_newest WHEN (ready.mode = 'mean') THEN ready.staleness_mean ELSE ready.staleness_oldest END AS DOUBLE) AS staleness, CASE WHEN (CAST(CASE WHEN (ready.mode = 'newest') THEN ready.staleness_newest WHEN (ready.mode = 'mean') THEN ready.staleness_mean ELSE ready.staleness_oldest END AS DOUBLE) <= ready.max_staleness) THEN 1 ELSE 0 END AS in_window, ready.ready_at, ((julianday('now') - 2440587.5) * 86400.0) - ready.ready_at AS waited_s FROM (SELECT run.id AS run_id, run.name AS run, sample_group.id AS group_id, sample_group.number AS number, sample_group.prompt_id AS prompt_id, prompt.dataset AS dataset, sample_group.epoch AS epoch, sample_group.n_samples AS n_samples, sample_group.n_failed AS n_failed, sample_group.n_tokens AS n_tokens, sample_group.reward_mean AS reward_mean, sample_group.reward_std AS reward_std, sample_group.oldest_version AS oldest_version, CASE WHEN (sample_group.import_key IS NOT NULL AND substr(sample_group.import_key, 1, 1) != '+') THEN 0 ELSE (SELECT weight_version_1.depth FROM weight_version AS weight_version_1 JOIN run ON run.id = weight_version_1.run_id AND run.current_version = weight_version_1.version WHERE run.id = sample_group.run_id) - (SELECT 2 * weight_version_2.common_depth - weight_version_2.depth AS anon_1 FROM weight_version AS weight_version_2 WHERE weight_version_2.run_id = sample_group.run_id AND weight_version_2.version = sample_group.oldest_version) END AS staleness_oldest, CASE WHEN (sample_group.import_key IS NOT NULL AND substr(sample_group.import_key, 1, 1) != '+') THEN 0 ELSE (SELECT CASE WHEN (sum(CASE WHEN (per_sample.staleness IS NULL) THEN 1 ELSE 0 END) > 0) THEN NULL ELSE max(per_sample.staleness) END AS anon_2 FROM (SELECT sample.id AS sample_id, sample.group_id AS group_id, CASE WHEN (sum(CASE WHEN (v.version IS NULL) THEN 1 ELSE 0 END) > 0) THEN NULL ELSE min(now.depth - (2 * v.common_depth - v.depth)) END AS staleness FROM sample JOIN segment ON segment.sample_id = sample.id AND segment.incarnation = sample.incarnation LEFT OUTER JOIN weight_version AS v ON v.run_id = sample.run_id AND v.version = segment.version_min WHERE segment.loss = 1 AND segment.kind = 'generated' AND sample.status != 'failed' AND sample.group_id = sample_group.id GROUP BY sample.id, sample.group_id) AS per_sample) END AS staleness_newest, CASE WHEN (sample_group.import_key IS NOT NULL AND substr(sample_group.import_key, 1, 1) != '+') THEN 0 ELSE (SELECT CASE WHEN (sum(CASE WHEN (per_sample.staleness IS NULL) THEN 1 ELSE 0 END) > 0) THEN NULL ELSE max(per_sample.staleness) END AS anon_3 FROM (SELECT sample.id AS sample_id, sample.group_id AS group_id, CASE WHEN (sum(CASE WHEN (v.version IS NULL) THEN 1 ELSE 0 END) > 0) THEN NULL ELSE CAST(sum(segment.n_tokens * (now.depth - (2 * v.common_depth - v.depth))) AS DOUBLE) / (sum(segment.n_tokens) + 0.0) END AS staleness FROM sample JOIN segment ON segment.sample_id = sample.id AND segment.incarnation = sample.incarnation LEFT OUTER JOIN weight_version AS v ON v.run_id = sample.run_id AND v.version = segment.version_min WHERE segment.loss = 1 AND segment.kind = 'generated' AND sample.status != 'failed' AND sample.group_id = sample_group.id GROUP BY sample.id, sample.group_id) AS per_sample) END AS staleness_mean, coalesce(CAST(JSON_EXTRACT(run.settings, '$.staleness_mode') AS VARCHAR), 'oldest') AS mode, coalesce(CAST(JSON_EXTRACT(run.settings, '$.max_staleness') AS INTEGER), 1) AS max_staleness, sample_group.ready_at AS ready_at FROM sample_group JOIN run ON run.id = sample_group.run_id JOIN prompt ON prompt.id = sample_group.prompt_id JOIN weight_version AS now ON now.run_id = run.id AND now.version = run.current_version WHERE sample_group.state = 'ready') AS ready
CREATE VIEW token_fate AS SELECT run.id AS run_id, run.name AS run, nullif(ledger_total.version, -1) AS version, ledger_total.fate, ledger_total.reason, CAST(sum(ledger_total.amount) AS BIGINT) AS tokens FROM ledger_total JOIN run ON run.id = ledger_total.run_id GROUP BY run.id, run.name, ledger_total.version, ledger_total.fate, ledger_total.reason HAVING sum(ledger_total.amount) != 0
CREATE VIEW version_rewards AS SELECT ended.run_id, ended.run, ended.version, ended.step, count(*) AS samples, count(ended.reward) AS scored, avg(CAST(ended.reward AS DOUBLE)) AS reward_mean, sqrt(CASE WHEN (avg(CAST(ended.reward * ended.reward AS DOUBLE)) - avg(CAST(ended.reward AS DOUBLE)) * avg(CAST(ended.reward AS DOUBLE)) < 0) THEN CAST(0 AS DOUBLE) ELSE avg(CAST(ended.reward * ended.reward AS DOUBLE)) - avg(CAST(ended.reward AS DOUBLE)) * avg(CAST(ended.reward AS DOUBLE)) END) AS reward_std, avg(CASE WHEN (ended.status = 'truncated') THEN CAST(1 AS DOUBLE) ELSE CAST(0 AS DOUBLE) END) AS truncated_ratio, avg(CAST(ended.n_tokens AS DOUBLE)) AS mean_tokens FROM (SELECT run.id AS run_id, run.name AS run, sample.version_max AS version, weight_version.step AS step, sample.status AS status, sample.n_tokens AS n_tokens, CASE WHEN (abs(sample.reward) < CAST(1e-100 AS DOUBLE)) THEN CAST(0.0 AS DOUBLE) WHEN (sample.reward > CAST(1e+50 AS DOUBLE)) THEN CAST(1e+50 AS DOUBLE) WHEN (sample.reward < CAST(-1e+50 AS DOUBLE)) THEN CAST(-1e+50 AS DOUBLE) ELSE sample.reward END AS reward FROM sample JOIN run ON run.id = sample.run_id JOIN sample_group ON sample_group.id = sample.group_id LEFT OUTER JOIN weight_version ON weight_version.run_id = sample.run_id AND weight_version.version = sample.version_max WHERE sample.status IN ('completed', 'truncated') AND sample_group.evaluation_id IS NULL) AS ended GROUP BY ended.run_id, ended.run, ended.version, ended.step
batch: CONSTRAINT ck_batch_state CHECK (state IN ('leased', 'committed', 'released', 'rewound'))
batch: CONSTRAINT fk_batch_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
batch: attempt INTEGER NOT NULL
batch: created_at DOUBLE NOT NULL
batch: current_version INTEGER NOT NULL
batch: id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT
batch: n_groups INTEGER NOT NULL
batch: n_samples INTEGER NOT NULL
batch: n_tokens INTEGER NOT NULL
batch: owner INTEGER NOT NULL
batch: plan JSON
batch: policy JSON NOT NULL
batch: reason TEXT
batch: run_id INTEGER NOT NULL
batch: settled_at DOUBLE
batch: state TEXT NOT NULL
batch: step INTEGER NOT NULL
batch: timeline INTEGER NOT NULL
batch_group: CONSTRAINT ck_batch_group_state CHECK (state IN ('leased', 'committed', 'released', 'rewound'))
batch_group: CONSTRAINT fk_batch_group_batch_id_batch FOREIGN KEY(batch_id) REFERENCES batch (id)
batch_group: CONSTRAINT fk_batch_group_group_id_sample_group FOREIGN KEY(group_id) REFERENCES sample_group (id)
batch_group: CONSTRAINT pk_batch_group PRIMARY KEY (batch_id, group_id)
batch_group: batch_id INTEGER NOT NULL
batch_group: group_id INTEGER NOT NULL
batch_group: position INTEGER NOT NULL
batch_group: staleness INTEGER
batch_group: state TEXT NOT NULL
dataset: CONSTRAINT ck_dataset_purpose CHECK (purpose IN ('train', 'eval', 'import'))
dataset: CONSTRAINT fk_dataset_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
dataset: CONSTRAINT pk_dataset PRIMARY KEY (run_id, name)
dataset: chunk_next INTEGER NOT NULL
dataset: chunk_start INTEGER NOT NULL
dataset: chunk_stop INTEGER NOT NULL
dataset: epoch INTEGER NOT NULL
dataset: n_prompts INTEGER NOT NULL
dataset: n_served INTEGER NOT NULL
dataset: name TEXT NOT NULL
dataset: purpose TEXT NOT NULL
dataset: run_id INTEGER NOT NULL
engine: CONSTRAINT ck_engine_state CHECK (state IN ('live', 'failed', 'gone'))
engine: CONSTRAINT fk_engine_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
engine: attempt INTEGER NOT NULL
engine: context_length INTEGER
engine: counter INTEGER
engine: counter_at DOUBLE
engine: created_at DOUBLE NOT NULL
engine: error TEXT
engine: failures INTEGER NOT NULL
engine: generated_tokens INTEGER DEFAULT 0 NOT NULL
engine: id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT
engine: label TEXT
engine: not_before DOUBLE NOT NULL
engine: owner INTEGER
engine: queued INTEGER
engine: release TEXT
engine: run_id INTEGER NOT NULL
engine: running INTEGER
engine: state TEXT NOT NULL
engine: updated_at DOUBLE NOT NULL
engine: url TEXT NOT NULL
engine: version INTEGER
episode_step: CONSTRAINT ck_episode_step_state CHECK (state IN ('started', 'done', 'failed'))
episode_step: CONSTRAINT fk_episode_step_sample_id_sample FOREIGN KEY(sample_id) REFERENCES sample (id)
episode_step: CONSTRAINT pk_episode_step PRIMARY KEY (sample_id, incarnation, number)
episode_step: asked JSON
episode_step: attempt INTEGER NOT NULL
episode_step: error TEXT
episode_step: idempotency_key TEXT NOT NULL
episode_step: incarnation INTEGER NOT NULL
episode_step: kind TEXT DEFAULT 'step' NOT NULL
episode_step: name TEXT NOT NULL
episode_step: number INTEGER NOT NULL
episode_step: result JSON
episode_step: sample_id INTEGER NOT NULL
episode_step: settled_at DOUBLE
episode_step: start INTEGER
episode_step: started_at DOUBLE NOT NULL
episode_step: state TEXT NOT NULL
episode_step: stop INTEGER
evaluation: CONSTRAINT fk_evaluation_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
evaluation: CONSTRAINT uq_evaluation_run_id_dataset_version_settings_key UNIQUE (run_id, dataset, version, settings_key)
evaluation: created_at DOUBLE NOT NULL
evaluation: dataset TEXT NOT NULL
evaluation: id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT
evaluation: max_new_tokens INTEGER
evaluation: n_groups INTEGER NOT NULL
evaluation: n_samples INTEGER NOT NULL
evaluation: run_id INTEGER NOT NULL
evaluation: sampling JSON NOT NULL
evaluation: settings_key TEXT NOT NULL
evaluation: version INTEGER NOT NULL
event: CONSTRAINT fk_event_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
event: at DOUBLE NOT NULL
event: details JSON
event: group_id INTEGER
event: id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT
event: kind TEXT NOT NULL
event: reason TEXT
event: run_id INTEGER NOT NULL
event: sample_id INTEGER
event: step INTEGER
event: tokens INTEGER
event: version INTEGER
event: worker_id INTEGER
event_total: CONSTRAINT fk_event_total_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
event_total: CONSTRAINT pk_event_total PRIMARY KEY (run_id, worker_id, kind, reason)
event_total: kind TEXT NOT NULL
event_total: n INTEGER NOT NULL
event_total: reason TEXT NOT NULL
event_total: run_id INTEGER NOT NULL
event_total: tokens INTEGER NOT NULL
event_total: worker_id INTEGER NOT NULL
ledger_total: CONSTRAINT ck_ledger_total_fate CHECK (fate IN ('in_flight', 'resumable', 'awaiting_stage', 'ready', 'leased', 'consumed', 'dropped', 'stale', 'failed', 'superseded'))
ledger_total: CONSTRAINT fk_ledger_total_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
ledger_total: CONSTRAINT pk_ledger_total PRIMARY KEY (run_id, worker_id, fate, reason, version)
ledger_total: amount INTEGER NOT NULL
ledger_total: fate TEXT NOT NULL
ledger_total: reason TEXT NOT NULL
ledger_total: run_id INTEGER NOT NULL
ledger_total: version INTEGER NOT NULL
ledger_total: worker_id INTEGER NOT NULL
prompt: CONSTRAINT fk_prompt_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
prompt: CONSTRAINT uq_prompt_run_id_content_key UNIQUE (run_id, content_key)
prompt: CONSTRAINT uq_prompt_run_id_position UNIQUE (run_id, position)
prompt: content_key TEXT NOT NULL
prompt: created_at DOUBLE NOT NULL
prompt: dataset TEXT NOT NULL
prompt: dataset_position INTEGER
prompt: id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT
prompt: images JSON
prompt: label JSON
prompt: metadata JSON NOT NULL
prompt: n_tokens INTEGER NOT NULL
prompt: position INTEGER NOT NULL
prompt: prompt JSON NOT NULL
prompt: prompt_ids BLOB NOT NULL
prompt: run_id INTEGER NOT NULL
prompt: template_args JSON
prompt: tools JSON
prompt_image: CONSTRAINT fk_prompt_image_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
prompt_image: CONSTRAINT pk_prompt_image PRIMARY KEY (run_id, digest)
prompt_image: data BLOB NOT NULL
prompt_image: digest TEXT NOT NULL
prompt_image: media_type TEXT NOT NULL
prompt_image: n_bytes INTEGER NOT NULL
prompt_image: run_id INTEGER NOT NULL
request: CONSTRAINT fk_request_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
request: CONSTRAINT fk_request_sample_id_sample FOREIGN KEY(sample_id) REFERENCES sample (id)
request: CONSTRAINT uq_request_rid UNIQUE (rid)
request: attempt INTEGER NOT NULL
request: cached_tokens INTEGER
request: e2e_s DOUBLE
request: engine TEXT
request: finish_reason TEXT
request: finished_at DOUBLE
request: generated_tokens INTEGER
request: greedy INTEGER
request: id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT
request: incarnation INTEGER NOT NULL
request: lost_reason TEXT
request: lost_tokens INTEGER
request: prompt_tokens INTEGER
request: queue_s DOUBLE
request: resumed_tokens INTEGER NOT NULL
request: retractions INTEGER
request: rid TEXT NOT NULL
request: run_id INTEGER NOT NULL
request: sample_id INTEGER NOT NULL
request: sampling_seed INTEGER
request: spec JSON
request: started_at DOUBLE NOT NULL
request: stored_tokens INTEGER NOT NULL
request: temperature DOUBLE
request: worker_id INTEGER NOT NULL
request_total: CONSTRAINT fk_request_total_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
request_total: CONSTRAINT pk_request_total PRIMARY KEY (run_id, worker_id, reason)
request_total: at DOUBLE NOT NULL
request_total: cached INTEGER NOT NULL
request_total: ended INTEGER NOT NULL
request_total: generated INTEGER NOT NULL
request_total: lost INTEGER NOT NULL
request_total: prompt INTEGER NOT NULL
request_total: reason TEXT NOT NULL
request_total: resumed INTEGER NOT NULL
request_total: resumes INTEGER NOT NULL
request_total: run_id INTEGER NOT NULL
request_total: stored INTEGER NOT NULL
request_total: unknown INTEGER NOT NULL
request_total: worker_id INTEGER NOT NULL
run: CONSTRAINT ck_run_state CHECK (state IN ('running', 'paused', 'draining'))
run: CONSTRAINT uq_run_name UNIQUE (name)
run: CONSTRAINT uq_run_uuid UNIQUE (uuid)
run: abort_reason TEXT
run: abort_seq INTEGER NOT NULL
run: chunk_next INTEGER NOT NULL
run: chunk_start INTEGER NOT NULL
run: chunk_stop INTEGER NOT NULL
run: created_at DOUBLE NOT NULL
run: current_version INTEGER NOT NULL
run: epoch INTEGER NOT NULL
run: id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT
run: last_version INTEGER NOT NULL
run: n_groups INTEGER NOT NULL
run: n_prompts INTEGER NOT NULL
run: name TEXT NOT NULL
run: retention_step INTEGER NOT NULL
run: settings JSON NOT NULL
run: state TEXT NOT NULL
run: step_filled INTEGER DEFAULT (-1) NOT NULL
run: step_over INTEGER DEFAULT (-1) NOT NULL
run: timeline INTEGER NOT NULL
run: uuid TEXT NOT NULL
sample: CONSTRAINT ck_sample_owned_is_unfinished CHECK (owner IS NULL OR status IN ('pending', 'aborted'))
sample: CONSTRAINT ck_sample_status CHECK (status IN ('pending', 'aborted', 'completed', 'truncated', 'failed'))
sample: CONSTRAINT fk_sample_group_id_sample_group FOREIGN KEY(group_id) REFERENCES sample_group (id)
sample: CONSTRAINT fk_sample_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
sample: CONSTRAINT uq_sample_group_id_index UNIQUE (group_id, index)
sample: attempt INTEGER NOT NULL
sample: claimed_at DOUBLE
sample: closed INTEGER NOT NULL
sample: created_at DOUBLE NOT NULL
sample: error TEXT
sample: failures INTEGER NOT NULL
sample: finish_reason TEXT
sample: finished_at DOUBLE
sample: finished_by INTEGER
sample: group_id INTEGER NOT NULL
sample: id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT
sample: incarnation INTEGER NOT NULL
sample: index INTEGER NOT NULL
sample: let_go INTEGER NOT NULL
sample: logprob_sum DOUBLE NOT NULL
sample: n_aborts INTEGER NOT NULL
sample: n_loss_tokens INTEGER NOT NULL
sample: n_resumes INTEGER NOT NULL
sample: n_segments INTEGER NOT NULL
sample: n_tokens INTEGER NOT NULL
sample: n_without_logprob INTEGER DEFAULT 0 NOT NULL
sample: not_before DOUBLE NOT NULL
sample: oldest_version INTEGER
sample: owner INTEGER
sample: parent_id INTEGER
sample: parent_upto INTEGER
sample: priority INTEGER NOT NULL
sample: progress_at DOUBLE
sample: removed TEXT
sample: reward DOUBLE
sample: run_id INTEGER NOT NULL
sample: status TEXT NOT NULL
sample: version_max INTEGER
sample: version_min INTEGER
sample: version_unknown INTEGER NOT NULL
sample_group: CONSTRAINT ck_sample_group_counters CHECK (n_open >= 0 AND n_unscored >= 0)
sample_group: CONSTRAINT ck_sample_group_state CHECK (state IN ('open', 'scoring', 'ready', 'leased', 'consumed', 'dropped', 'stale', 'superseded'))
sample_group: CONSTRAINT fk_sample_group_prompt_id_prompt FOREIGN KEY(prompt_id) REFERENCES prompt (id)
sample_group: CONSTRAINT fk_sample_group_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
sample_group: CONSTRAINT uq_sample_group_run_id_number UNIQUE (run_id, number)
sample_group: created_at DOUBLE NOT NULL
sample_group: epoch INTEGER NOT NULL
sample_group: evaluation_id INTEGER
sample_group: id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT
sample_group: import_key TEXT
sample_group: n_failed INTEGER NOT NULL
sample_group: n_open INTEGER NOT NULL
sample_group: n_samples INTEGER NOT NULL
sample_group: n_tokens INTEGER
sample_group: n_unscored INTEGER NOT NULL
sample_group: number INTEGER NOT NULL
sample_group: oldest_version INTEGER
sample_group: prompt_id INTEGER NOT NULL
sample_group: pruned_at DOUBLE
sample_group: ready_at DOUBLE
sample_group: reason TEXT
sample_group: reward_mean DOUBLE
sample_group: reward_std DOUBLE
sample_group: run_id INTEGER NOT NULL
sample_group: settled_at DOUBLE
sample_group: state TEXT NOT NULL
sample_group: straggling_at DOUBLE
sample_group: superseded_by INTEGER
sample_group: timeline INTEGER NOT NULL
segment: CONSTRAINT ck_segment_kind CHECK (kind IN ('generated', 'environment'))
segment: CONSTRAINT ck_segment_n_tokens CHECK (n_tokens > 0)
segment: CONSTRAINT fk_segment_sample_id_sample FOREIGN KEY(sample_id) REFERENCES sample (id)
segment: CONSTRAINT pk_segment PRIMARY KEY (sample_id, incarnation, seq)
segment: attempt INTEGER NOT NULL
segment: created_at DOUBLE NOT NULL
segment: engine TEXT
segment: finish_reason TEXT
segment: incarnation INTEGER NOT NULL
segment: kind TEXT NOT NULL
segment: logprob_sum DOUBLE NOT NULL
segment: loss INTEGER NOT NULL
segment: n_tokens INTEGER NOT NULL
segment: owner INTEGER NOT NULL
segment: payload BLOB NOT NULL
segment: request_rid TEXT
segment: sample_id INTEGER NOT NULL
segment: seq INTEGER NOT NULL
segment: start INTEGER NOT NULL
segment: version_max INTEGER
segment: version_min INTEGER
segment_array: CONSTRAINT fk_segment_array_sample_id_sample FOREIGN KEY(sample_id) REFERENCES sample (id)
segment_array: CONSTRAINT pk_segment_array PRIMARY KEY (sample_id, incarnation, seq, name)
segment_array: codec TEXT NOT NULL
segment_array: created_at DOUBLE NOT NULL
segment_array: data BLOB
segment_array: dtype TEXT NOT NULL
segment_array: incarnation INTEGER NOT NULL
segment_array: n_bytes INTEGER
segment_array: name TEXT NOT NULL
segment_array: sample_id INTEGER NOT NULL
segment_array: seq INTEGER NOT NULL
segment_array: shape JSON NOT NULL
segment_array: sidecar TEXT
stage: CONSTRAINT ck_stage_status CHECK (status IN ('pending', 'done', 'failed'))
stage: CONSTRAINT fk_stage_group_id_sample_group FOREIGN KEY(group_id) REFERENCES sample_group (id)
stage: CONSTRAINT fk_stage_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
stage: CONSTRAINT fk_stage_sample_id_sample FOREIGN KEY(sample_id) REFERENCES sample (id)
stage: CONSTRAINT uq_stage_sample_id_incarnation_name UNIQUE (sample_id, incarnation, name)
stage: attempt INTEGER NOT NULL
stage: claimed_at DOUBLE
stage: created_at DOUBLE NOT NULL
stage: details JSON
stage: elapsed_s DOUBLE
stage: error TEXT
stage: failures INTEGER NOT NULL
stage: group_id INTEGER NOT NULL
stage: id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT
stage: incarnation INTEGER NOT NULL
stage: let_go INTEGER NOT NULL
stage: name TEXT NOT NULL
stage: not_before DOUBLE NOT NULL
stage: outcome TEXT
stage: owner INTEGER
stage: run_id INTEGER NOT NULL
stage: sample_id INTEGER
stage: settled_at DOUBLE
stage: status TEXT NOT NULL
stage: value DOUBLE
timeline: CONSTRAINT fk_timeline_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
timeline: CONSTRAINT pk_timeline PRIMARY KEY (run_id, number)
timeline: created_at DOUBLE NOT NULL
timeline: forked_at_step INTEGER
timeline: number INTEGER NOT NULL
timeline: parent INTEGER
timeline: run_id INTEGER NOT NULL
weight_version: CONSTRAINT fk_weight_version_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
weight_version: CONSTRAINT pk_weight_version PRIMARY KEY (run_id, version)
weight_version: CONSTRAINT uq_weight_version_run_id_label UNIQUE (run_id, label)
weight_version: abandoned_at DOUBLE
weight_version: common_depth INTEGER NOT NULL
weight_version: created_at DOUBLE NOT NULL
weight_version: depth INTEGER NOT NULL
weight_version: label TEXT NOT NULL
weight_version: parent INTEGER
weight_version: path TEXT
weight_version: run_id INTEGER NOT NULL
weight_version: step INTEGER
weight_version: timeline INTEGER NOT NULL
weight_version: version INTEGER NOT NULL
worker: CONSTRAINT ck_worker_kind CHECK (kind IN ('rollout', 'reward', 'trainer', 'tool'))
worker: CONSTRAINT ck_worker_state CHECK (state IN ('live', 'dead', 'gone'))
worker: CONSTRAINT fk_worker_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
worker: ended_at DOUBLE
worker: error TEXT
worker: heartbeat DOUBLE NOT NULL
worker: host TEXT NOT NULL
worker: id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT
worker: info JSON NOT NULL
worker: kind TEXT NOT NULL
worker: name TEXT NOT NULL
worker: pid INTEGER NOT NULL
worker: run_id INTEGER NOT NULL
worker: started_at DOUBLE NOT NULL
worker: state TEXT NOT NULL
worker: ttl_s DOUBLE NOT NULL
