package agent

// Statuses of blocks in DONE, as docs/PROTOCOL.md has them.
const (
	blockOK         uint8 = 0
	blockExists     uint8 = 1
	blockInProgress uint8 = 2
	blockBusy       uint8 = 3
	blockStale      uint8 = 4
	blockMissing    uint8 = 5
	blockCorrupt    uint8 = 6
	blockInvalid    uint8 = 7
	blockCancelled  uint8 = 17
	blockFailed     uint8 = 19
	blockOff        uint8 = 20
)
