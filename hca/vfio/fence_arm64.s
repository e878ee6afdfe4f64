#include "textflag.h"

// func fence()
TEXT ·fence(SB), NOSPLIT, $0-0
	DMB	$3 // OSH: outer shareable, loads and stores
	RET
