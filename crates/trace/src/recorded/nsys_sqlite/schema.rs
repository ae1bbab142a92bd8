//! The tables of the file.

/// The version of the `STROBE_*` tables that this code writes and reads.
pub(super) const FORMAT_VERSION: &str = "1";

/// The version of Nsight Systems' export schema that the other tables follow.
pub(super) const NSYS_SCHEMA: [u32; 3] = [3, 20, 3];

/// `ENUM_NSYS_EVENT_TYPE` of a range that nests on its thread.
pub(super) const PUSH_POP: i64 = 59;

/// `ENUM_NSYS_EVENT_TYPE` of a range that may overlap others of its thread.
pub(super) const START_END: i64 = 60;

/// Nsight Systems' tables, with its columns in its order.
pub(super) const NSYS_TABLES: &str = "
CREATE TABLE StringIds (
    id INTEGER NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (
    utcEpochNs INTEGER,
    utcTime TEXT,
    localTime TEXT
);
CREATE TABLE ANALYSIS_DETAILS (
    globalVid INTEGER NOT NULL,
    duration INTEGER NOT NULL,
    startTime INTEGER NOT NULL,
    stopTime INTEGER NOT NULL
);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL,
    end INTEGER,
    eventType INTEGER NOT NULL,
    rangeId INTEGER,
    category INTEGER,
    color INTEGER,
    text TEXT,
    globalTid INTEGER,
    endGlobalTid INTEGER,
    textId INTEGER,
    domainId INTEGER,
    uint64Value INTEGER,
    int64Value INTEGER,
    doubleValue REAL,
    uint32Value INTEGER,
    int32Value INTEGER,
    floatValue REAL,
    jsonTextId INTEGER,
    jsonText TEXT,
    binaryData TEXT
);
CREATE TABLE PROCESSES (
    globalPid INTEGER,
    pid INTEGER,
    name TEXT
);
CREATE TABLE ThreadNames (
    nameId INTEGER NOT NULL,
    priority INTEGER,
    globalTid INTEGER
);
CREATE TABLE ENUM_NSYS_EVENT_TYPE (
    id INTEGER NOT NULL PRIMARY KEY,
    name TEXT,
    label TEXT
);
INSERT INTO ENUM_NSYS_EVENT_TYPE VALUES
    (33, 'NvtxCategory', 'NvtxCategory'),
    (34, 'NvtxMark', 'NvtxMark'),
    (39, 'NvtxThread', 'NvtxThread'),
    (59, 'NvtxPushPopRange', 'NvtxPushPopRange'),
    (60, 'NvtxStartEndRange', 'NvtxStartEndRange'),
    (70, 'NvtxtPushPopRange', 'NvtxtPushPopRange'),
    (71, 'NvtxtStartEndRange', 'NvtxtStartEndRange'),
    (75, 'NvtxDomainCreate', 'NvtxDomainCreate'),
    (76, 'NvtxDomainDestroy', 'NvtxDomainDestroy');
CREATE TABLE META_DATA_CAPTURE (
    name TEXT NOT NULL,
    value TEXT
);
CREATE TABLE META_DATA_EXPORT (
    name TEXT NOT NULL,
    value TEXT
);
";

/// strobe's tables. `eventId` is a row number (`rowid`) of `NVTX_EVENTS`; an op's or range's order among
/// its fellows is its own row number.
pub(super) const STROBE_TABLES: &str = "
CREATE TABLE STROBE_META (
    name TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
);
CREATE TABLE STROBE_OP (
    eventId INTEGER NOT NULL, -- REFERENCES NVTX_EVENTS(rowid)
    start INTEGER NOT NULL,
    end INTEGER NOT NULL,
    globalTid INTEGER NOT NULL,
    nameId INTEGER NOT NULL, -- REFERENCES StringIds(id)
    categoryId INTEGER NOT NULL, -- REFERENCES StringIds(id)
    kernelId INTEGER NOT NULL, -- REFERENCES StringIds(id)
    layer INTEGER,
    iter INTEGER NOT NULL,
    m INTEGER NOT NULL, -- 0 where it does not apply
    n INTEGER NOT NULL,
    k INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    flops INTEGER NOT NULL
);
CREATE TABLE STROBE_RANGE (
    eventId INTEGER NOT NULL, -- REFERENCES NVTX_EVENTS(rowid)
    kind TEXT NOT NULL,
    iter INTEGER
);
CREATE TABLE STROBE_ITERATION (
    iter INTEGER NOT NULL,
    kind TEXT NOT NULL,
    start INTEGER NOT NULL,
    end INTEGER NOT NULL,
    contextRequests INTEGER NOT NULL,
    generationRequests INTEGER NOT NULL,
    contextTokens INTEGER NOT NULL,
    generationTokens INTEGER NOT NULL,
    window INTEGER NOT NULL
);
CREATE TABLE STROBE_WINDOW (
    windowIndex INTEGER NOT NULL,
    firstIter INTEGER NOT NULL,
    lastIter INTEGER NOT NULL,
    complete INTEGER NOT NULL
);
";

/// Keys of `STROBE_META`.
pub(super) mod key {
    pub(in super::super) const FORMAT_VERSION: &str = "FORMAT_VERSION";
    pub(in super::super) const PRODUCER: &str = "PRODUCER";
    pub(in super::super) const PARTIAL: &str = "PARTIAL";
    pub(in super::super) const STRINGS: &str = "STRINGS";
    pub(in super::super) const OPS: &str = "OPS";
    pub(in super::super) const RANGES: &str = "RANGES";
    pub(in super::super) const ITERATIONS: &str = "ITERATIONS";
    pub(in super::super) const WINDOWS: &str = "WINDOWS";
    pub(in super::super) const PEAK_FLOPS: &str = "PEAK_FLOPS_PER_S";
    pub(in super::super) const PEAK_BYTES: &str = "PEAK_BYTES_PER_S";
    pub(in super::super) const PEAK_NOTE: &str = "PEAK_NOTE";
    /// Prefix of the keys of `Meta::extra`.
    pub(in super::super) const EXTRA: &str = "EXTRA:";
}
