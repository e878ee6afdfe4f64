package soft

import "time"

// rnrTimes are the RNR NAK timer values (IBTA 1.4 table 45) in units of 10 µs.
var rnrTimes = [32]uint32{
	65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
	256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
}

func rnrTime(code uint8) time.Duration {
	return time.Duration(rnrTimes[code&31]) * 10 * time.Microsecond
}

// transportTime is how long a peer may stay silent: the first try and
// retryCnt more, each 4.096 µs · 2^timeout (IBTA 1.4 §9.7.6.1.3).
func transportTime(timeout, retryCnt uint8) time.Duration {
	return time.Duration(retryCnt+1) * (4096 * time.Nanosecond << (timeout & 31))
}
