package virtionet

import "time"

// Shorten the waits, before any port is open.
func SetTimes(reset, ctrl, health time.Duration) {
	resetWait, ctrlWait, healthTick = reset, ctrl, health
}

// The device's side reaches the rings as the driver's does.
var (
	Load32  = load32
	Store32 = store32
)

const (
	MaxGroups = maxGroups
	TxBatch   = txBatch
)
